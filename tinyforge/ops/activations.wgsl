// Elementwise activations. KIND: 0 ReLU, 1 the logistic function, 2 SiLU, 3 tanh.

struct Sizes { count: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> out: array<real>;
@group(0) @binding(2) var<storage, read> x: array<real>;  // backward: what forward saved, x of SiLU, y of the others
@group(0) @binding(3) var<storage, read> dy: array<real>;

override KIND: u32 = 0;

@compute @workgroup_size(256)
fn forward(place: Place) {
    let i = item_of(place);
    if (i >= sizes.count) {
        return;
    }
    let v = x[i];
    switch (KIND) {
        case 0: { out[i] = max(v, real(0.0)); }
        case 1: { out[i] = sigmoid(v); }
        case 2: { out[i] = v * sigmoid(v); }
        default: { out[i] = real_tanh(v); }
    }
}

// SiLU's slope is s (1 + x (1 - s)); 1 - s is s(-x), which keeps its digits.
@compute @workgroup_size(256)
fn backward(place: Place) {
    let i = item_of(place);
    if (i >= sizes.count) {
        return;
    }
    let v = x[i];
    switch (KIND) {
        case 0: { out[i] = select(real(0.0), dy[i], v > 0.0); }
        case 1: { out[i] = dy[i] * v * (real(1.0) - v); }
        case 2: { out[i] = dy[i] * sigmoid(v) * (real(1.0) + v * sigmoid(-v)); }
        default: { out[i] = dy[i] * (real(1.0) - v * v); }
    }
}
