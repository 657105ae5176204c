// c = a b, or c += a b, with either factor transposed, and a bias or a matrix added in the same pass.
//
// A group of 256 threads computes TILE x TILE results, a thread PER x PER of them in registers, TILE = 16 PER. In turns of
// DEPTH along k the group copies a tile of each factor to its own memory, where every number is then read 16 times. The
// constants are written before this text: a small product takes small tiles, so that all of the device has work.
//
// A thread's rows and columns come in fours: of each 64 the four at 4 place. It reads them as one vec4, and the threads
// next to it read, and write, the fours next to these.

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

var<workgroup> tile_a: array<vec4<real>, TILE * DEPTH / 4>;  // (DEPTH, TILE)
var<workgroup> tile_b: array<vec4<real>, TILE * DEPTH / 4>;

fn a_at(row: u32, k: u32) -> real {
    if (row >= sizes.rows || k >= sizes.depth) {
        return 0.0;
    }
    return a[select(row * sizes.depth + k, k * sizes.rows + row, TRANSPOSE_A)];
}

fn b_at(k: u32, column: u32) -> real {
    if (k >= sizes.depth || column >= sizes.columns) {
        return 0.0;
    }
    return b[select(k * sizes.columns + column, column * sizes.depth + k, TRANSPOSE_B)];
}

@compute @workgroup_size(16, 16)
fn gemm(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
        @builtin(local_invocation_id) place: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let number = group.y * grid.x + group.x;
    let top = number / sizes.across * TILE;
    let left = number % sizes.across * TILE;
    if (top >= sizes.rows) {
        return;
    }
    var sum: array<array<vec4<real>, FOURS>, PER>;
    for (var k0 = 0u; k0 < sizes.depth; k0 += DEPTH) {
        // A thread writes whole vectors: one component of them may be written with the others. Neighbouring threads read
        // neighbouring numbers of the factor as it lies in memory.
        for (var i = thread; i < TILE * DEPTH / 4; i += 256u) {
            let ka = select(i % DEPTH, i / (TILE / 4), TRANSPOSE_A);
            let m = select(i / DEPTH, i % (TILE / 4), TRANSPOSE_A);
            let row = top + 4 * m;
            tile_a[ka * TILE / 4 + m] = vec4(
                a_at(row, k0 + ka), a_at(row + 1, k0 + ka), a_at(row + 2, k0 + ka), a_at(row + 3, k0 + ka));
            let kb = select(i / (TILE / 4), i % DEPTH, TRANSPOSE_B);
            let n = select(i % (TILE / 4), i / DEPTH, TRANSPOSE_B);
            let column = left + 4 * n;
            tile_b[kb * TILE / 4 + n] = vec4(
                b_at(k0 + kb, column), b_at(k0 + kb, column + 1), b_at(k0 + kb, column + 2), b_at(k0 + kb, column + 3));
        }
        workgroupBarrier();
        for (var k = 0u; k < DEPTH; k++) {  // unrolled
            var z: array<vec4<real>, FOURS>;
            for (var j = 0u; j < FOURS; j++) {  // unrolled
                z[j] = tile_b[k * TILE / 4 + 16 * j + place.x];
            }
            for (var i = 0u; i < FOURS; i++) {  // unrolled
                let x = tile_a[k * TILE / 4 + 16 * i + place.y];
                for (var j = 0u; j < FOURS; j++) {  // unrolled
                    sum[4 * i][j] += x.x * z[j];
                    sum[4 * i + 1][j] += x.y * z[j];
                    sum[4 * i + 2][j] += x.z * z[j];
                    sum[4 * i + 3][j] += x.w * z[j];
                }
            }
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < PER; i++) {  // unrolled
        for (var j = 0u; j < PER; j++) {  // unrolled
            let row = top + i / 4 * 64 + 4 * place.y + i % 4;
            let column = left + j / 4 * 64 + 4 * place.x + j % 4;
            if (row < sizes.rows && column < sizes.columns) {
                let at = row * sizes.columns + column;
                var y = sum[i][j / 4][j % 4];
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
