// c = a b, or c += a b, with either factor transposed, and a bias or a matrix added in the same pass.
//
// A group of 256 threads computes TILE x TILE results, a thread PER x PER of them in registers, TILE = 16 PER. In turns of
// DEPTH along k the group copies a tile of each factor to its own memory, where every number is then read 16 times. The
// three constants are written before this text: a small product takes small tiles, so that all of the device has work.

struct Sizes { rows: u32, columns: u32, depth: u32, across: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> c: array<real>;
@group(0) @binding(2) var<storage, read> a: array<real>;
@group(0) @binding(3) var<storage, read> b: array<real>;
@group(0) @binding(4) var<storage, read> bias: array<real>;
@group(0) @binding(5) var<storage, read> add: array<real>;

override TRANSPOSE_A: bool = false;  // a is (depth, rows)
override TRANSPOSE_B: bool = false;  // b is (columns, depth)
override ACCUMULATE: bool = false;
override BIAS: bool = false;
override ADD: bool = false;

var<workgroup> tile_a: array<real, TILE * DEPTH>;  // (DEPTH, TILE)
var<workgroup> tile_b: array<real, TILE * DEPTH>;

@compute @workgroup_size(16, 16)
fn gemm(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
        @builtin(local_invocation_id) place: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let number = group.y * grid.x + group.x;
    let top = number / sizes.across * TILE;
    let left = number % sizes.across * TILE;
    if (top >= sizes.rows) {
        return;
    }
    var sum: array<array<real, PER>, PER>;
    for (var k0 = 0u; k0 < sizes.depth; k0 += DEPTH) {
        for (var i = thread; i < TILE * DEPTH; i += 256u) {
            // Neighbouring threads read neighbouring numbers of the factor as it lies in memory.
            var k = i % DEPTH;
            var m = i / DEPTH;
            if (TRANSPOSE_A) {
                k = i / TILE;
                m = i % TILE;
            }
            let row = top + m;
            var x: real = 0.0;
            if (row < sizes.rows && k0 + k < sizes.depth) {
                if (TRANSPOSE_A) {
                    x = a[(k0 + k) * sizes.rows + row];
                } else {
                    x = a[row * sizes.depth + k0 + k];
                }
            }
            tile_a[k * TILE + m] = x;
            k = i / TILE;
            var n = i % TILE;
            if (TRANSPOSE_B) {
                k = i % DEPTH;
                n = i / DEPTH;
            }
            let column = left + n;
            var z: real = 0.0;
            if (column < sizes.columns && k0 + k < sizes.depth) {
                if (TRANSPOSE_B) {
                    z = b[column * sizes.depth + k0 + k];
                } else {
                    z = b[(k0 + k) * sizes.columns + column];
                }
            }
            tile_b[k * TILE + n] = z;
        }
        workgroupBarrier();
        for (var k = 0u; k < DEPTH; k++) {
            var x: array<real, PER>;
            var z: array<real, PER>;
            for (var i = 0u; i < PER; i++) {
                x[i] = tile_a[k * TILE + place.y * PER + i];
                z[i] = tile_b[k * TILE + place.x * PER + i];
            }
            for (var i = 0u; i < PER; i++) {
                for (var j = 0u; j < PER; j++) {
                    sum[i][j] += x[i] * z[j];
                }
            }
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < PER; i++) {
        for (var j = 0u; j < PER; j++) {
            let row = top + place.y * PER + i;
            let column = left + place.x * PER + j;
            if (row < sizes.rows && column < sizes.columns) {
                let at = row * sizes.columns + column;
                var y = sum[i][j];
                if (BIAS) {
                    y += bias[column];
                }
                if (ADD) {
                    y += add[at];
                }
                if (ACCUMULATE) {
                    y += c[at];
                }
                c[at] = y;
            }
        }
    }
}
