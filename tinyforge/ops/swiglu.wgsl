// SwiGLU: y = silu(g) u, of rows [g | u] of twice the width.

struct Sizes { count: u32, half: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> y: array<real>;
@group(0) @binding(2) var<storage, read> gu: array<real>;
@group(0) @binding(3) var<storage, read_write> dgu: array<real>;
@group(0) @binding(4) var<storage, read> dy: array<real>;

override HIDDEN: bool = false;  // backward: write y too

@compute @workgroup_size(256)
fn swiglu_fwd(place: Place) {
    let i = item_of(place);
    if (i >= sizes.count) {
        return;
    }
    let gate = i / sizes.half * 2 * sizes.half + i % sizes.half;
    y[i] = sigmoid(gu[gate]) * gu[gate] * gu[gate + sizes.half];
}

// dg = dy u s (1 + g (1 - s)),  du = dy g s;  1 - s is s(-g), which keeps its digits.
@compute @workgroup_size(256)
fn swiglu_bwd(place: Place) {
    let i = item_of(place);
    if (i >= sizes.count) {
        return;
    }
    let at = i / sizes.half * 2 * sizes.half + i % sizes.half;
    let g = gu[at];
    let u = gu[at + sizes.half];
    let s = sigmoid(g);
    let d = dy[i];
    dgu[at] = d * u * s * (real(1.0) + g * sigmoid(-g));
    dgu[at + sizes.half] = d * g * s;
    if (HIDDEN) {
        y[i] = g * s * u;
    }
}
