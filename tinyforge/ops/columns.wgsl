// out[j] += the sum over i of x[i, j], in a fixed order: for gradients of biases and gains.

struct Sizes { rows: u32, width: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> out: array<real>;
@group(0) @binding(2) var<storage, read> x: array<real>;

var<workgroup> partial: array<real, 256>;

// 32 columns, and of each 8 threads that take every eighth row.
@compute @workgroup_size(32, 8)
fn add_columns(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) place: vec3<u32>) {
    let column = group.x * 32 + place.x;
    var sum: real = 0.0;
    if (column < sizes.width) {
        for (var row = place.y; row < sizes.rows; row += 8u) {
            sum += x[row * sizes.width + column];
        }
    }
    partial[place.y * 32 + place.x] = sum;
    workgroupBarrier();
    if (place.y == 0 && column < sizes.width) {
        for (var i = 1u; i < 8u; i++) {
            sum += partial[i * 32 + place.x];
        }
        out[column] += sum;
    }
}
