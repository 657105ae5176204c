// The router of a mixture of experts: a thread takes a token, whose experts are few.

struct Sizes { rows: u32, experts: u32, choices: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read> logits: array<real>;
@group(0) @binding(2) var<storage, read_write> weights: array<real>;
@group(0) @binding(3) var<storage, read_write> chosen: array<i32>;
@group(0) @binding(4) var<storage, read_write> shares: array<real>;  // (rows, experts + 1): p, and logsumexp squared

override NORMALISED: bool = true;

fn log_sum_exp(first: u32) -> real {
    var top = logits[first];
    for (var e = 1u; e < sizes.experts; e++) {
        top = max(top, logits[first + e]);
    }
    var total: real = 0.0;
    for (var e = 0u; e < sizes.experts; e++) {
        total += real_exp(logits[first + e] - top);
    }
    return top + real_log(total);
}

// The next choice is the largest logit after the last one in order: smaller, or equal with a larger number.
@compute @workgroup_size(64)
fn router_fwd(place: Place) {
    let row = block_of(place) * 64 + place.thread;
    if (row >= sizes.rows) {
        return;
    }
    let first = row * sizes.experts;
    let lse = log_sum_exp(first);
    for (var e = 0u; e < sizes.experts; e++) {
        shares[first + row + e] = real_exp(logits[first + e] - lse);
    }
    shares[first + row + sizes.experts] = lse * lse;
    var last = -1;
    var total: real = 0.0;
    var top: real = 0.0;
    for (var j = 0u; j < sizes.choices; j++) {
        var next = -1;
        for (var e = 0; e < i32(sizes.experts); e++) {
            let z = logits[first + u32(e)];
            var after = last < 0;
            if (!after) {
                let before = logits[first + u32(last)];
                after = z < before || (z == before && e > last);
            }
            if (after) {
                if (next < 0) {
                    next = e;
                } else if (z > logits[first + u32(next)]) {
                    next = e;
                }
            }
        }
        // A logit that is no number is after none: any expert but the last will do, and the loss shows it.
        next = max(next, 0);
        let z = logits[first + u32(next)];
        if (j == 0) {
            top = z;
        }
        let at = row * sizes.choices + j;
        chosen[at] = next;
        if (NORMALISED) {
            weights[at] = real_exp(z - top);
            total += weights[at];
        } else {
            weights[at] = real_exp(z - lse);
        }
        last = next;
    }
    if (NORMALISED) {
        for (var j = 0u; j < sizes.choices; j++) {
            weights[row * sizes.choices + j] /= total;
        }
    }
}

@group(0) @binding(5) var<storage, read_write> dlogits: array<real>;
@group(0) @binding(6) var<storage, read> dweights: array<real>;
@group(0) @binding(7) var<storage, read> dusage: array<real>;
@group(0) @binding(8) var<storage, read> saved_weights: array<real>;
@group(0) @binding(9) var<storage, read> saved_chosen: array<i32>;

@compute @workgroup_size(64)
fn router_bwd(place: Place) {
    let row = block_of(place) * 64 + place.thread;
    if (row >= sizes.rows) {
        return;
    }
    let first = row * sizes.experts;
    let choice = row * sizes.choices;
    let lse = log_sum_exp(first);
    var mean: real = 0.0;
    for (var e = 0u; e < sizes.experts; e++) {
        mean += real_exp(logits[first + e] - lse) * dusage[e];
    }
    var along: real = 0.0;
    for (var j = 0u; j < sizes.choices; j++) {
        along += saved_weights[choice + j] * dweights[choice + j];
    }
    for (var e = 0u; e < sizes.experts; e++) {
        let p = real_exp(logits[first + e] - lse);
        var d = p * (dusage[e] - mean) + real(2.0) * dusage[sizes.experts] * lse * p;
        var through: real = 0.0;
        if (!NORMALISED) {
            through = -p * along;
        }
        for (var j = 0u; j < sizes.choices; j++) {
            if (saved_chosen[choice + j] == i32(e)) {
                through += saved_weights[choice + j] * dweights[choice + j];
                if (NORMALISED) {
                    through -= saved_weights[choice + j] * along;
                }
            }
        }
        dlogits[first + e] = d + through;
    }
}
