// Attention without the T x T matrix: an online softmax forward, and a backward that recomputes the probabilities.
//
// A thread has a query (backward: a query, then a key), a group 64 of one head. The group walks over the others in
// tiles of TILE, which it copies to its own memory. HEAD: numbers in a head; both constants are written before this text.

struct Sizes {
    scale: real, softcap: real, keep: real,
    batch: u32, queries: u32, keys: u32, heads: u32, kv_heads: u32,
    causal: u32, window: u32, threshold: u32, key0: u32, key1: u32,
    // where each array begins, and its steps from one sequence, row and head to the next
    q_at: u32, q_b: u32, q_t: u32, q_h: u32,
    k_at: u32, k_b: u32, k_t: u32, k_h: u32,
    v_at: u32, v_b: u32, v_t: u32, v_h: u32,
    o_at: u32, o_b: u32, o_t: u32, o_h: u32,
    dy_at: u32, dy_b: u32, dy_t: u32, dy_h: u32,
    dq_at: u32, dq_b: u32, dq_t: u32, dq_h: u32,
    dk_at: u32, dk_b: u32, dk_t: u32, dk_h: u32,
    dv_at: u32, dv_b: u32, dv_t: u32, dv_h: u32,
}

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> out: array<real>;
@group(0) @binding(2) var<storage, read_write> lse: array<real>;  // (B, heads, T)
@group(0) @binding(3) var<storage, read> q: array<real>;
@group(0) @binding(4) var<storage, read> k: array<real>;
@group(0) @binding(5) var<storage, read> v: array<real>;
@group(0) @binding(6) var<storage, read> lengths: array<i32>;
@group(0) @binding(7) var<storage, read> starts: array<i32>;
@group(0) @binding(8) var<storage, read> dy: array<real>;
@group(0) @binding(9) var<storage, read> saved_out: array<real>;
@group(0) @binding(10) var<storage, read> saved_lse: array<real>;
@group(0) @binding(11) var<storage, read_write> delta: array<real>;  // rowsum(dO O), (B, heads, T)
@group(0) @binding(12) var<storage, read> saved_delta: array<real>;
@group(0) @binding(13) var<storage, read_write> dq: array<real>;
@group(0) @binding(14) var<storage, read_write> dkv: array<real>;

override LENGTHS: bool = false;
override STARTS: bool = false;
override DROPOUT: bool = false;
override SOFTCAP: bool = false;

var<workgroup> tile_a: array<real, TILE * HEAD>;
var<workgroup> tile_b: array<real, TILE * HEAD>;
var<workgroup> tile_lse: array<real, TILE>;
var<workgroup> tile_delta: array<real, TILE>;

// The keys that query t of sequence b sees: from .x up to .y.
fn seen(b: u32, t: u32) -> vec2<u32> {
    var first = 0u;
    var last = sizes.keys;
    let place = t + sizes.keys - sizes.queries;
    if (sizes.causal == 1u) {
        last = min(last, place + 1u);
        if (sizes.window > 0u && place + 1u > sizes.window) {
            first = place + 1u - sizes.window;
        }
    }
    if (STARTS) {
        first = max(first, u32(starts[b * sizes.queries + t]));
    }
    if (LENGTHS) {
        last = min(last, u32(lengths[b]));
    }
    return vec2<u32>(first, last);
}

// 1 / (1 - rate) or 0: of a square of 16 x 16 scores, a block of Philox has the words for rows t, t + 8 and keys s, s + 8.
fn mask(b: u32, head: u32, t: u32, s: u32) -> real {
    let counter = vec4<u32>(s / 16u * 8u + s % 8u, t / 16u * 8u + t % 8u, head, b);
    let words = philox(counter, vec2<u32>(sizes.key0, sizes.key1));
    if (words[t / 8u % 2u * 2u + s / 8u % 2u] >= sizes.threshold) {
        return sizes.keep;
    }
    return 0.0;
}

// The score after the cap, and the cap's derivative.
fn capped(score: real) -> vec2<real> {
    if (SOFTCAP) {
        let t = real_tanh(score / sizes.softcap);
        return vec2<real>(t * sizes.softcap, real(1.0) - t * t);
    }
    return vec2<real>(score, 1.0);
}

// The keys that the 64 queries of a group walk over: from .x, where a tile begins, up to .y.
fn walked(group: u32) -> vec2<u32> {
    if (sizes.causal == 0u) {
        return vec2<u32>(0u, sizes.keys);
    }
    let place = group * 64u + sizes.keys - sizes.queries + 1u;
    var begin = 0u;
    if (sizes.window > 0u && place > sizes.window) {
        begin = (place - sizes.window) / TILE * TILE;
    }
    return vec2<u32>(begin, min(sizes.keys, place + 63u));
}

fn copy_keys(first: u32, b: u32, kv: u32, thread: u32) {
    for (var i = thread; i < TILE * HEAD; i += 64u) {
        let s = first + i / HEAD;
        if (s < sizes.keys) {
            tile_a[i] = k[sizes.k_at + b * sizes.k_b + s * sizes.k_t + kv * sizes.k_h + i % HEAD];
            tile_b[i] = v[sizes.v_at + b * sizes.v_b + s * sizes.v_t + kv * sizes.v_h + i % HEAD];
        }
    }
}

@compute @workgroup_size(64)
fn attention_fwd(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.x * 64u + thread;
    let head = group.y;
    let b = group.z;
    let kv = head / (sizes.heads / sizes.kv_heads);
    let inside = t < sizes.queries;
    var mine: array<real, HEAD>;
    var sum: array<real, HEAD>;
    var range = vec2<u32>(0u, 0u);
    if (inside) {
        range = seen(b, t);
        for (var d = 0u; d < HEAD; d++) {  // unrolled
            mine[d] = q[sizes.q_at + b * sizes.q_b + t * sizes.q_t + head * sizes.q_h + d] * sizes.scale;
            sum[d] = 0.0;
        }
    }
    var top: real = -1e30;
    var total: real = 0.0;
    let keys = walked(group.x);
    for (var first = keys.x; first < keys.y; first += TILE) {
        copy_keys(first, b, kv, thread);
        workgroupBarrier();
        if (inside) {
            for (var j = max(first, range.x); j < min(first + TILE, range.y); j++) {
                let row = (j - first) * HEAD;
                var score: real = 0.0;
                for (var d = 0u; d < HEAD; d++) {  // unrolled
                    score += mine[d] * tile_a[row + d];
                }
                score = capped(score).x;
                if (score > top) {
                    let shrink = real_exp(top - score);
                    total *= shrink;
                    for (var d = 0u; d < HEAD; d++) {  // unrolled
                        sum[d] *= shrink;
                    }
                    top = score;
                }
                let p = real_exp(score - top);
                total += p;
                var weight = p;
                if (DROPOUT) {
                    weight *= mask(b, head, t, j);
                }
                for (var d = 0u; d < HEAD; d++) {  // unrolled
                    sum[d] += weight * tile_b[row + d];
                }
            }
        }
        workgroupBarrier();
    }
    if (inside) {
        for (var d = 0u; d < HEAD; d++) {  // unrolled
            out[sizes.o_at + b * sizes.o_b + t * sizes.o_t + head * sizes.o_h + d] = sum[d] / total;
        }
        lse[(b * sizes.heads + head) * sizes.queries + t] = top + real_log(total);
    }
}

@compute @workgroup_size(64)
fn attention_delta(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.x * 64u + thread;
    if (t >= sizes.queries) {
        return;
    }
    var sum: real = 0.0;
    for (var d = 0u; d < HEAD; d++) {
        sum += dy[sizes.dy_at + group.z * sizes.dy_b + t * sizes.dy_t + group.y * sizes.dy_h + d]
            * saved_out[sizes.o_at + group.z * sizes.o_b + t * sizes.o_t + group.y * sizes.o_h + d];
    }
    delta[(group.z * sizes.heads + group.y) * sizes.queries + t] = sum;
}

// dQ = dS K scale, of a query.
@compute @workgroup_size(64)
fn attention_bwd_queries(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let t = group.x * 64u + thread;
    let head = group.y;
    let b = group.z;
    let kv = head / (sizes.heads / sizes.kv_heads);
    let inside = t < sizes.queries;
    var mine: array<real, HEAD>;
    var up: array<real, HEAD>;
    var sum: array<real, HEAD>;
    var range = vec2<u32>(0u, 0u);
    var norm: real = 0.0;
    var along: real = 0.0;
    if (inside) {
        range = seen(b, t);
        norm = saved_lse[(b * sizes.heads + head) * sizes.queries + t];
        along = saved_delta[(b * sizes.heads + head) * sizes.queries + t];
        for (var d = 0u; d < HEAD; d++) {  // unrolled
            mine[d] = q[sizes.q_at + b * sizes.q_b + t * sizes.q_t + head * sizes.q_h + d] * sizes.scale;
            up[d] = dy[sizes.dy_at + b * sizes.dy_b + t * sizes.dy_t + head * sizes.dy_h + d];
            sum[d] = 0.0;
        }
    }
    let keys = walked(group.x);
    for (var first = keys.x; first < keys.y; first += TILE) {
        copy_keys(first, b, kv, thread);
        workgroupBarrier();
        if (inside) {
            for (var j = max(first, range.x); j < min(first + TILE, range.y); j++) {
                let row = (j - first) * HEAD;
                var score: real = 0.0;
                var dp: real = 0.0;
                for (var d = 0u; d < HEAD; d++) {  // unrolled
                    score += mine[d] * tile_a[row + d];
                    dp += up[d] * tile_b[row + d];
                }
                let c = capped(score);
                if (DROPOUT) {
                    dp *= mask(b, head, t, j);
                }
                let ds = real_exp(c.x - norm) * (dp - along) * c.y * sizes.scale;
                for (var d = 0u; d < HEAD; d++) {  // unrolled
                    sum[d] += ds * tile_a[row + d];
                }
            }
        }
        workgroupBarrier();
    }
    if (inside) {
        for (var d = 0u; d < HEAD; d++) {  // unrolled
            dq[sizes.dq_at + b * sizes.dq_b + t * sizes.dq_t + head * sizes.dq_h + d] = sum[d];
        }
    }
}

// dK = dS^T Q scale and dV = (P m)^T dO, of a key: sums over the query heads that share it, and their queries.
@compute @workgroup_size(64)
fn attention_bwd_keys(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let s = group.x * 64u + thread;
    let kv = group.y;
    let b = group.z;
    let shared_by = sizes.heads / sizes.kv_heads;
    let inside = s < sizes.keys;
    var key: array<real, HEAD>;
    var value: array<real, HEAD>;
    var dkey: array<real, HEAD>;
    var dvalue: array<real, HEAD>;
    if (inside) {
        for (var d = 0u; d < HEAD; d++) {  // unrolled
            key[d] = k[sizes.k_at + b * sizes.k_b + s * sizes.k_t + kv * sizes.k_h + d] * sizes.scale;
            value[d] = v[sizes.v_at + b * sizes.v_b + s * sizes.v_t + kv * sizes.v_h + d];
            dkey[d] = 0.0;
            dvalue[d] = 0.0;
        }
    }
    var begin = 0u;
    if (sizes.causal == 1u && group.x * 64u > sizes.keys - sizes.queries) {
        begin = (group.x * 64u - (sizes.keys - sizes.queries)) / TILE * TILE;
    }
    for (var head = kv * shared_by; head < (kv + 1u) * shared_by; head++) {
        for (var first = begin; first < sizes.queries; first += TILE) {
            for (var i = thread; i < TILE * HEAD; i += 64u) {
                let t = first + i / HEAD;
                if (t < sizes.queries) {
                    tile_a[i] = q[sizes.q_at + b * sizes.q_b + t * sizes.q_t + head * sizes.q_h + i % HEAD];
                    tile_b[i] = dy[sizes.dy_at + b * sizes.dy_b + t * sizes.dy_t + head * sizes.dy_h + i % HEAD];
                }
            }
            if (thread < TILE && first + thread < sizes.queries) {
                tile_lse[thread] = saved_lse[(b * sizes.heads + head) * sizes.queries + first + thread];
                tile_delta[thread] = saved_delta[(b * sizes.heads + head) * sizes.queries + first + thread];
            }
            workgroupBarrier();
            if (inside) {
                for (var t = first; t < min(first + TILE, sizes.queries); t++) {
                    let range = seen(b, t);
                    if (s < range.x || s >= range.y) {
                        continue;
                    }
                    let row = (t - first) * HEAD;
                    var score: real = 0.0;
                    var dp: real = 0.0;
                    for (var d = 0u; d < HEAD; d++) {  // unrolled
                        score += key[d] * tile_a[row + d];
                        dp += value[d] * tile_b[row + d];
                    }
                    let c = capped(score);
                    let p = real_exp(c.x - tile_lse[t - first]);
                    var weight = p;
                    if (DROPOUT) {
                        let m = mask(b, head, t, s);
                        weight *= m;
                        dp *= m;
                    }
                    let ds = p * (dp - tile_delta[t - first]) * c.y * sizes.scale;
                    for (var d = 0u; d < HEAD; d++) {  // unrolled
                        dkey[d] += ds * tile_a[row + d];
                        dvalue[d] += weight * tile_b[row + d];
                    }
                }
            }
            workgroupBarrier();
        }
    }
    if (inside) {
        for (var d = 0u; d < HEAD; d++) {  // unrolled
            dkv[sizes.dk_at + b * sizes.dk_b + s * sizes.dk_t + kv * sizes.dk_h + d] = dkey[d];
            dkv[sizes.dv_at + b * sizes.dv_b + s * sizes.dv_t + kv * sizes.dv_h + d] = dvalue[d];
        }
    }
}
