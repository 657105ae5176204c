// Passes of a decoder over few positions: int8 weights, dequantised where they are read, and keys and values in a cache.
// Each layer is five launches: qkv, attend, project (out), gate_up, project (down); project is the output head too. The
// browser's page launches them (web/page/gpu.js), and natively decoder_webgpu.py.
//
// In the products 16 lanes share four rows of codes and a row of x, that of the position `group.y`; a group has four times
// 16 lanes, and so 16 results. The lanes read all of x between them, so that its norm is summed in the same loop. A `word`
// is four codes or four numbers: `codes` is in codes_int8.wgsl or codes_real.wgsl.

struct Sizes {
    eps: real,
    start: u32,     // positions in the cache before this pass
    skip: u32,      // rows of x before the first
    inner: u32,
    outer: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    context: u32,
}

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> y: array<real>;
@group(0) @binding(2) var<storage, read> x: array<vec4<real>>;
@group(0) @binding(3) var<storage, read> gain: array<vec4<real>>;
@group(0) @binding(4) var<storage, read> words: array<word>;     // (outer, inner / 4)
@group(0) @binding(5) var<storage, read> scales: array<real>;
@group(0) @binding(6) var<storage, read> turns: array<vec2<real>>;  // cos and sin, (context, head_dim / 2)
@group(0) @binding(7) var<storage, read_write> keys: array<real>;    // (kv_heads, context, head_dim)
@group(0) @binding(8) var<storage, read_write> values: array<real>;
@group(0) @binding(9) var<storage, read> q: array<real>;
@group(0) @binding(10) var<storage, read> ids: array<i32>;

override NORM: bool = false;  // x is normalised first
override ADD: bool = false;   // y += instead of y =
override SCALED: bool = true;  // a word is of codes, with a scale for each row
override GATHER: bool = false;  // `dequantise` takes the rows that `ids` name

const THREADS = 64u;
const LANES = 16u;

var<workgroup> lane_sums: array<vec4<real>, THREADS>;
var<workgroup> lane_squares: array<real, THREADS>;

// The products of four rows with a row of x, the same in all 16 lanes. One barrier, and a loop over the lanes: a tree would
// have a barrier for each of its levels.
fn products(rows: vec4<u32>, position: u32, thread: u32) -> vec4<real> {
    let n = sizes.inner / 4u;
    let at = rows * n;
    var sum = vec4<real>();
    var squares: real = 0.0;
    for (var j = thread % LANES; j < n; j += LANES) {
        var v = x[position * n + j];
        if (NORM) {
            squares += dot(v, v);
            v *= gain[j];
        }
        sum += vec4<real>(
            dot(codes(words[at.x + j]), v),
            dot(codes(words[at.y + j]), v),
            dot(codes(words[at.z + j]), v),
            dot(codes(words[at.w + j]), v),
        );
    }
    lane_sums[thread] = sum;
    lane_squares[thread] = squares;
    workgroupBarrier();
    let lane0 = thread - thread % LANES;
    sum = vec4<real>();
    squares = 0.0;
    for (var i = 0u; i < LANES; i++) {
        sum += lane_sums[lane0 + i];
        squares += lane_squares[lane0 + i];
    }
    if (SCALED) {
        sum *= vec4<real>(scales[rows.x], scales[rows.y], scales[rows.z], scales[rows.w]);
    }
    if (NORM) {
        return sum / sqrt(squares / real(sizes.inner) + sizes.eps);
    }
    return sum;
}

// Four neighbouring rows.
@compute @workgroup_size(THREADS)
fn project(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = 4u * (group.x * (THREADS / LANES) + thread / LANES);
    let rows = min(vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(sizes.outer - 1u));
    let sum = products(rows, group.y + sizes.skip, thread);
    let lane = thread % LANES;
    if (lane < 4u && first + lane < sizes.outer) {
        let at = group.y * sizes.outer + first + lane;
        if (ADD) {
            y[at] += sum[lane];
        } else {
            y[at] = sum[lane];
        }
    }
}

// y = silu(gate) up: two neighbouring rows of the gate, and those of up, which begin at `outer`.
@compute @workgroup_size(THREADS)
fn gate_up(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = 2u * (group.x * (THREADS / LANES) + thread / LANES);
    let gates = min(vec2<u32>(first, first + 1u), vec2<u32>(sizes.outer - 1u));
    let sum = products(vec4<u32>(gates, gates + sizes.outer), group.y, thread);
    let lane = thread % LANES;
    if (lane < 2u && first + lane < sizes.outer) {
        y[group.y * sizes.outer + first + lane] = sum[lane] / (real(1.0) + real_exp(-sum[lane])) * sum[lane + 2u];
    }
}

// Queries, rotated and divided by sqrt(head_dim), into y; keys, rotated, and values into the cache. RoPE turns the rows i
// and i + head_dim / 2 of a head together: two such pairs.
@compute @workgroup_size(THREADS)
fn qkv(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let half = sizes.head_dim / 2u;
    let count = (sizes.heads + 2u * sizes.kv_heads) * half;
    let first = 2u * (group.x * (THREADS / LANES) + thread / LANES);
    let pairs = min(vec2<u32>(first, first + 1u), vec2<u32>(count - 1u));
    let heads = pairs / half;
    let rows = heads * sizes.head_dim + pairs % half;
    let sum = products(vec4<u32>(rows, rows + half), group.y, thread);
    let lane = thread % LANES;
    if (lane >= 2u || first + lane >= count) {
        return;
    }
    let head = heads[lane];
    let i = pairs[lane] % half;
    let position = sizes.start + group.y;
    var made = vec2<real>(sum[lane], sum[lane + 2u]);
    if (head < sizes.heads + sizes.kv_heads) {
        let turn = turns[position * half + i];
        made = vec2<real>(made.x * turn.x - made.y * turn.y, made.y * turn.x + made.x * turn.y);
    }
    if (head < sizes.heads) {
        let at = (group.y * sizes.heads + head) * sizes.head_dim + i;
        made /= sqrt(real(sizes.head_dim));
        y[at] = made.x;
        y[at + half] = made.y;
    } else if (head < sizes.heads + sizes.kv_heads) {
        let at = ((head - sizes.heads) * sizes.context + position) * sizes.head_dim + i;
        keys[at] = made.x;
        keys[at + half] = made.y;
    } else {
        let at = ((head - sizes.heads - sizes.kv_heads) * sizes.context + position) * sizes.head_dim + i;
        values[at] = made.x;
        values[at + half] = made.y;
    }
}

var<workgroup> query: array<real, 256>;
var<workgroup> weights: array<real, 256>;

// A group for each head, `group.x`, and position: softmax(q keys) values, 256 positions of the cache at a time.
@compute @workgroup_size(256)
fn attend(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let size = sizes.head_dim;
    let base = group.x / (sizes.heads / sizes.kv_heads) * sizes.context * size;
    let at = (group.y * sizes.heads + group.x) * size;
    let length = sizes.start + group.y + 1u;
    let parts = 256u / size;  // threads that share one number of the result
    let part = thread / size;
    if (thread < size) {
        query[thread] = q[at + thread];
    }
    workgroupBarrier();
    let least: real = -1e30;
    var top = least;
    var total: real = 0.0;
    var sum: real = 0.0;
    for (var first = 0u; first < length; first += 256u) {
        let s = first + thread;
        var score = least;
        if (s < length) {
            score = 0.0;
            for (var i = 0u; i < size; i++) {
                score += query[i] * keys[base + s * size + i];
            }
        }
        let highest = max(top, group_max(thread, score));
        let shrink = real_exp(top - highest);
        var weight: real = 0.0;
        if (s < length) {
            weight = real_exp(score - highest);
        }
        weights[thread] = weight;
        total = total * shrink + group_sum(thread, weight);
        sum *= shrink;
        if (part < parts) {
            for (var j = part; j < min(256u, length - first); j += parts) {
                sum += weights[j] * values[base + (first + j) * size + thread % size];
            }
        }
        top = highest;
        workgroupBarrier();
    }
    weights[thread] = sum;
    workgroupBarrier();
    if (thread < size) {
        var result: real = 0.0;
        for (var p = 0u; p < parts; p++) {
            result += weights[p * size + thread];
        }
        y[at + thread] = result / total;
    }
}

// Rows of a matrix as numbers: `outer` of them from the first on, or those that ids[skip], ids[skip + 1] ... name.
@compute @workgroup_size(THREADS)
fn dequantise(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>,
              @builtin(local_invocation_index) thread: u32) {
    let n = sizes.inner / 4u;
    let i = (group.y * grid.x + group.x) * THREADS + thread;
    if (i >= sizes.outer * n) {
        return;
    }
    var row = i / n;
    if (GATHER) {
        row = u32(ids[sizes.skip + row]);
    }
    var v = codes(words[row * n + i % n]);
    if (SCALED) {
        v *= scales[row];
    }
    y[4u * i] = v.x;
    y[4u * i + 1u] = v.y;
    y[4u * i + 2u] = v.z;
    y[4u * i + 3u] = v.w;
}
