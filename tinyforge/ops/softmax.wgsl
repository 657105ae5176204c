// Softmax over rows: a group of 256 threads takes one.

struct Sizes { rows: u32, width: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> out: array<real>;
@group(0) @binding(2) var<storage, read> x: array<real>;
@group(0) @binding(3) var<storage, read> y: array<real>;
@group(0) @binding(4) var<storage, read> dy: array<real>;

@compute @workgroup_size(256)
fn softmax_fwd(place: Place) {
    let row = block_of(place);
    if (row >= sizes.rows) {
        return;
    }
    let first = row * sizes.width;
    var highest = x[first];
    for (var j = place.thread; j < sizes.width; j += 256u) {
        highest = max(highest, x[first + j]);
    }
    let top = group_max(place.thread, highest);
    var part: real = 0.0;
    for (var j = place.thread; j < sizes.width; j += 256u) {
        let e = real_exp(x[first + j] - top);
        out[first + j] = e;
        part += e;
    }
    let total = group_sum(place.thread, part);
    for (var j = place.thread; j < sizes.width; j += 256u) {
        out[first + j] /= total;
    }
}

// dx = y (dy - sum of dy y)
@compute @workgroup_size(256)
fn softmax_bwd(place: Place) {
    let row = block_of(place);
    if (row >= sizes.rows) {
        return;
    }
    let first = row * sizes.width;
    var part: real = 0.0;
    for (var j = place.thread; j < sizes.width; j += 256u) {
        part += dy[first + j] * y[first + j];
    }
    let along = group_sum(place.thread, part);
    for (var j = place.thread; j < sizes.width; j += 256u) {
        out[first + j] = y[first + j] * (dy[first + j] - along);
    }
}
