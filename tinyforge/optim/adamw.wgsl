// AdamW's update, a thread per weight, and partial sums of squares for the norm of the gradient.

struct Sizes {
    rate: real, root: real, shrink: real, grad_scale: real, beta1: real, rest1: real, beta2: real, rest2: real, eps: real,
    count: u32,
}

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> weights: array<real>;
@group(0) @binding(2) var<storage, read_write> m: array<real>;
@group(0) @binding(3) var<storage, read_write> v: array<real>;
@group(0) @binding(4) var<storage, read> grads: array<real>;
@group(0) @binding(5) var<storage, read_write> sums: array<real>;

@compute @workgroup_size(256)
fn adamw(place: Place) {
    let i = item_of(place);
    if (i >= sizes.count) {
        return;
    }
    let g = grads[i] * sizes.grad_scale;
    let m1 = m[i] * sizes.beta1 + g * sizes.rest1;
    let m2 = v[i] * sizes.beta2 + g * g * sizes.rest2;
    m[i] = m1;
    v[i] = m2;
    weights[i] = weights[i] * sizes.shrink - m1 / (sqrt(m2) * sizes.root + sizes.eps) * sizes.rate;
}

@compute @workgroup_size(256)
fn square_sums(place: Place) {
    var sum: real = 0.0;
    for (var i = place.group.x * 256 + place.thread; i < sizes.count; i += place.grid.x * 256) {
        sum += grads[i] * grads[i];
    }
    let total = group_sum(place.thread, sum);
    if (place.thread == 0) {
        sums[place.group.x] = total;
    }
}
