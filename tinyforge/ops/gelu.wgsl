// GELU by the tanh formula, with a bias added to its input in the same pass, and GeGLU: gelu(g) u of rows [g | u].

struct Sizes { count: u32, width: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> y: array<real>;
@group(0) @binding(2) var<storage, read> x: array<real>;
@group(0) @binding(3) var<storage, read> bias: array<real>;
@group(0) @binding(4) var<storage, read_write> dx: array<real>;
@group(0) @binding(5) var<storage, read> dy: array<real>;

override BIAS: bool = false;
override HIDDEN: bool = false;  // backward: write y too

fn input(i: u32) -> real {
    var value = x[i];
    if (BIAS) {
        value += bias[i % sizes.width];
    }
    return value;
}

// s(2z) = (1 + tanh(z)) / 2,  z = sqrt(2 / pi) (x + 0.044715 x^3)
fn share(value: real) -> real {
    return sigmoid(real(1.5957691216057308) * (value + real(0.044715) * value * value * value));
}

@compute @workgroup_size(256)
fn gelu_fwd(place: Place) {
    let i = item_of(place);
    if (i >= sizes.count) {
        return;
    }
    let value = input(i);
    y[i] = value * share(value);
}

// dy (s + x s(-) s 2z'),  z' = sqrt(2 / pi) (1 + 3 0.044715 x^2)
@compute @workgroup_size(256)
fn gelu_bwd(place: Place) {
    let i = item_of(place);
    if (i >= sizes.count) {
        return;
    }
    let value = input(i);
    let s = share(value);
    let slope = real(1.5957691216057308) * (real(1.0) + real(0.134145) * value * value);
    dx[i] = dy[i] * (s + value * s * share(-value) * slope);
    if (HIDDEN) {
        y[i] = value * s;
    }
}

// y: (rows, width), x: (rows, 2 width)
@compute @workgroup_size(256)
fn geglu_fwd(place: Place) {
    let i = item_of(place);
    if (i >= sizes.count) {
        return;
    }
    let at = i / sizes.width * 2 * sizes.width + i % sizes.width;
    let g = x[at];
    y[i] = g * share(g) * x[at + sizes.width];
}

@compute @workgroup_size(256)
fn geglu_bwd(place: Place) {
    let i = item_of(place);
    if (i >= sizes.count) {
        return;
    }
    let at = i / sizes.width * 2 * sizes.width + i % sizes.width;
    let g = x[at];
    let s = share(g);
    let slope = real(1.5957691216057308) * (real(1.0) + real(0.134145) * g * g);
    dx[at] = dy[i] * x[at + sizes.width] * (s + g * s * share(-g) * slope);
    dx[at + sizes.width] = dy[i] * g * s;
}
