// Rows of logits become softmax - onehot in place, and give their negative log-likelihood.

struct Sizes { rows: u32, vocab: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> nll: array<real>;
@group(0) @binding(2) var<storage, read_write> logits: array<real>;
@group(0) @binding(3) var<storage, read> targets: array<i32>;

// A group per row, of one token and head.
@compute @workgroup_size(256)
fn softmax_residual(place: Place) {
    let row = block_of(place);
    if (row >= sizes.rows) {
        return;
    }
    let first = row * sizes.vocab;
    let answer = targets[row];
    if (answer < 0) {
        for (var j = place.thread; j < sizes.vocab; j += 256u) {
            logits[first + j] = 0.0;
        }
        if (place.thread == 0) {
            nll[row] = 0.0;
        }
        return;
    }
    var highest = logits[first];
    for (var j = place.thread; j < sizes.vocab; j += 256u) {
        highest = max(highest, logits[first + j]);
    }
    let top = group_max(place.thread, highest);
    let picked = logits[first + u32(answer)] - top;
    var part: real = 0.0;
    for (var j = place.thread; j < sizes.vocab; j += 256u) {
        part += real_exp(logits[first + j] - top);
    }
    let total = group_sum(place.thread, part);
    for (var j = place.thread; j < sizes.vocab; j += 256u) {
        var p = real_exp(logits[first + j] - top) / total;
        if (j == u32(answer)) {
            p -= 1.0;
        }
        logits[first + j] = p;
    }
    if (place.thread == 0) {
        nll[row] = real_log(total) - picked;
    }
}

@group(0) @binding(4) var<storage, read_write> scaled: array<real>;
@group(0) @binding(5) var<storage, read> residual: array<real>;
@group(0) @binding(6) var<storage, read> dnll: array<real>;

override IN_PLACE: bool = false;

// Rows times dnll, which has a number for each row, or one for each head: the rows of a token are those of its heads.
@compute @workgroup_size(256)
fn scale_rows(place: Place) {
    let row = block_of(place);
    if (row >= sizes.rows) {
        return;
    }
    let factor = dnll[row % arrayLength(&dnll)];
    for (var j = place.thread; j < sizes.vocab; j += 256u) {
        let at = row * sizes.vocab + j;
        if (IN_PLACE) {
            scaled[at] *= factor;
        } else {
            scaled[at] = residual[at] * factor;
        }
    }
}
