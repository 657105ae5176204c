// RMSNorm, forward and backward, with the addition of a residual stream before it or after its gradient.

struct Sizes { eps: real, rows: u32, width: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> y: array<real>;
@group(0) @binding(2) var<storage, read_write> rstd: array<real>;
@group(0) @binding(3) var<storage, read> x: array<real>;
@group(0) @binding(4) var<storage, read> weight: array<real>;
@group(0) @binding(5) var<storage, read_write> sum: array<real>;
@group(0) @binding(6) var<storage, read> delta: array<real>;

override ADD: bool = false;       // forward: normalise sum = x + delta
override PLUS_ONE: bool = false;  // the gain is 1 + weight
override RESIDUAL: bool = false;  // backward: add another gradient of x

fn gain(j: u32) -> real {
    var w = weight[j];
    if (PLUS_ONE) {
        w += 1.0;
    }
    let least: real = 8.881784197001252e-16;  // 2^-50: a gain nearer to 0 counts as this
    if (abs(w) < least) {
        return least;
    }
    return w;
}

@compute @workgroup_size(256)
fn rmsnorm_fwd(place: Place) {
    let row = block_of(place);
    if (row >= sizes.rows) {
        return;
    }
    let first = row * sizes.width;
    var squares: real = 0.0;
    for (var j = place.thread; j < sizes.width; j += 256u) {
        var value = x[first + j];
        if (ADD) {
            value += delta[first + j];
            sum[first + j] = value;
        }
        squares += value * value;
    }
    let r = real(1.0) / sqrt(group_sum(place.thread, squares) / real(sizes.width) + sizes.eps);
    for (var j = place.thread; j < sizes.width; j += 256u) {
        var value = x[first + j];
        if (ADD) {
            value = sum[first + j];
        }
        y[first + j] = value * r * gain(j);
    }
    if (place.thread == 0) {
        rstd[row] = r;
    }
}

@group(0) @binding(7) var<storage, read_write> dx: array<real>;
@group(0) @binding(8) var<storage, read_write> product: array<real>;
@group(0) @binding(9) var<storage, read> dy: array<real>;
@group(0) @binding(10) var<storage, read> saved_y: array<real>;
@group(0) @binding(11) var<storage, read> saved_rstd: array<real>;
@group(0) @binding(12) var<storage, read> residual: array<real>;

// dx = r (dy w - y / w mean(dy y)) (+ residual); product = dy y / w, whose sum over the rows is dweight.
@compute @workgroup_size(256)
fn rmsnorm_bwd(place: Place) {
    let row = block_of(place);
    if (row >= sizes.rows) {
        return;
    }
    let first = row * sizes.width;
    var along: real = 0.0;
    for (var j = place.thread; j < sizes.width; j += 256u) {
        along += dy[first + j] * saved_y[first + j];
    }
    let mean = group_sum(place.thread, along) / real(sizes.width);
    for (var j = place.thread; j < sizes.width; j += 256u) {
        let w = gain(j);
        let xhat = saved_y[first + j] / w;
        product[first + j] = dy[first + j] * xhat;
        var d = saved_rstd[row] * (dy[first + j] * w - xhat * mean);
        if (RESIDUAL) {
            d += residual[first + j];
        }
        dx[first + j] = d;
    }
}
