// RoPE: pairs (x_i, x_{i + half}) of the first `rotated` heads are turned; the other heads are copied.

struct Sizes { count: u32, heads: u32, half: u32, rotated: u32, length: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> y: array<real>;
@group(0) @binding(2) var<storage, read> x: array<real>;
@group(0) @binding(3) var<storage, read> cosines: array<real>;
@group(0) @binding(4) var<storage, read> sines: array<real>;

override IN_PLACE: bool = false;

// A thread per pair of x, (B, T, heads, 2 half).
@compute @workgroup_size(256)
fn rope(place: Place) {
    let pair = item_of(place);
    if (pair >= sizes.count) {
        return;
    }
    let i = pair % sizes.half;
    let head = pair / sizes.half % sizes.heads;
    let position = pair / (sizes.half * sizes.heads) % sizes.length;
    let left = pair / sizes.half * 2 * sizes.half + i;
    let right = left + sizes.half;
    var a: real;
    var b: real;
    if (IN_PLACE) {
        a = y[left];
        b = y[right];
    } else {
        a = x[left];
        b = x[right];
    }
    if (head < sizes.rotated) {
        let c = cosines[position * sizes.half + i];
        let s = sines[position * sizes.half + i];
        y[left] = a * c - b * s;
        y[right] = b * c + a * s;
    } else {
        y[left] = a;
        y[right] = b;
    }
}
