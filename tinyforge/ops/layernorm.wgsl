// LayerNorm, forward and backward, with the addition of a residual stream before it or after its gradient.

struct Sizes { eps: real, rows: u32, width: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> y: array<real>;
@group(0) @binding(2) var<storage, read_write> mean: array<real>;
@group(0) @binding(3) var<storage, read_write> rstd: array<real>;
@group(0) @binding(4) var<storage, read> x: array<real>;
@group(0) @binding(5) var<storage, read> weight: array<real>;
@group(0) @binding(6) var<storage, read> bias: array<real>;
@group(0) @binding(7) var<storage, read_write> sum: array<real>;
@group(0) @binding(8) var<storage, read> delta: array<real>;

override ADD: bool = false;       // forward: normalise sum = x + delta
override BIAS: bool = false;
override RESIDUAL: bool = false;  // backward: add another gradient of x

fn input(at: u32) -> real {
    if (ADD) {
        return sum[at];
    }
    return x[at];
}

@compute @workgroup_size(256)
fn layernorm_fwd(place: Place) {
    let row = block_of(place);
    if (row >= sizes.rows) {
        return;
    }
    let first = row * sizes.width;
    var total: real = 0.0;
    for (var j = place.thread; j < sizes.width; j += 256u) {
        if (ADD) {
            sum[first + j] = x[first + j] + delta[first + j];
        }
        total += input(first + j);
    }
    let centre = group_sum(place.thread, total) / real(sizes.width);
    var squares: real = 0.0;
    for (var j = place.thread; j < sizes.width; j += 256u) {
        let off = input(first + j) - centre;
        squares += off * off;
    }
    let r = real(1.0) / sqrt(group_sum(place.thread, squares) / real(sizes.width) + sizes.eps);
    for (var j = place.thread; j < sizes.width; j += 256u) {
        var value = (input(first + j) - centre) * r * weight[j];
        if (BIAS) {
            value += bias[j];
        }
        y[first + j] = value;
    }
    if (place.thread == 0) {
        mean[row] = centre;
        rstd[row] = r;
    }
}

@group(0) @binding(9) var<storage, read_write> dx: array<real>;
@group(0) @binding(10) var<storage, read_write> product: array<real>;
@group(0) @binding(11) var<storage, read> dy: array<real>;
@group(0) @binding(12) var<storage, read> saved_mean: array<real>;
@group(0) @binding(13) var<storage, read> saved_rstd: array<real>;
@group(0) @binding(14) var<storage, read> residual: array<real>;

// g = dy w;  dx = r (g - mean(g) - xhat mean(g xhat)) (+ residual);  product = dy xhat, whose sum is dweight.
@compute @workgroup_size(256)
fn layernorm_bwd(place: Place) {
    let row = block_of(place);
    if (row >= sizes.rows) {
        return;
    }
    let first = row * sizes.width;
    let centre = saved_mean[row];
    let r = saved_rstd[row];
    var plain: real = 0.0;
    var along: real = 0.0;
    for (var j = place.thread; j < sizes.width; j += 256u) {
        let g = dy[first + j] * weight[j];
        plain += g;
        along += g * (x[first + j] - centre) * r;
    }
    let mean_g = group_sum(place.thread, plain) / real(sizes.width);
    let mean_along = group_sum(place.thread, along) / real(sizes.width);
    // A compiler may round the product in g - mean(g) as it did not in the sum, which r then multiplies by up to
    // 1 / sqrt(eps): the mean of what is left is taken away too. Of one number nothing is left.
    var rest: real = 0.0;
    for (var j = place.thread; j < sizes.width; j += 256u) {
        rest += dy[first + j] * weight[j] - mean_g;
    }
    let mean_rest = group_sum(place.thread, rest) / real(sizes.width);
    for (var j = place.thread; j < sizes.width; j += 256u) {
        let xhat = (x[first + j] - centre) * r;
        product[first + j] = dy[first + j] * xhat;
        var d = r * (dy[first + j] * weight[j] - mean_g - mean_rest - xhat * mean_along);
        if (RESIDUAL) {
            d += residual[first + j];
        }
        dx[first + j] = d;
    }
}
