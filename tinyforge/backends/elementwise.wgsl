// y = a (operation) b over strided views. Y, A, B: the types of the arrays.

struct Sizes {
    scalar: real,
    count: u32,
    at_y: u32,
    at_a: u32,
    at_b: u32,
    // of each dimension, the innermost first: its size and the steps of y, a and b
    n0: u32, y0: u32, a0: u32, b0: u32,
    n1: u32, y1: u32, a1: u32, b1: u32,
    n2: u32, y2: u32, a2: u32, b2: u32,
    n3: u32, y3: u32, a3: u32, b3: u32,
    n4: u32, y4: u32, a4: u32, b4: u32,
    n5: u32, y5: u32, a5: u32, b5: u32,
}

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> y: array<Y>;
@group(0) @binding(2) var<storage, read> a: array<A>;
@group(0) @binding(3) var<storage, read> b: array<B>;

override OPERATION: u32 = 0;
override IN_PLACE: bool = false;
override SCALAR: bool = false;

@compute @workgroup_size(256)
fn apply(place: Place) {
    let i = item_of(place);
    if (i >= sizes.count) {
        return;
    }
    let s = sizes;
    var rest = i;
    var at = vec3<u32>(s.at_y, s.at_a, s.at_b);
    at += (rest % s.n0) * vec3<u32>(s.y0, s.a0, s.b0); rest /= s.n0;
    at += (rest % s.n1) * vec3<u32>(s.y1, s.a1, s.b1); rest /= s.n1;
    at += (rest % s.n2) * vec3<u32>(s.y2, s.a2, s.b2); rest /= s.n2;
    at += (rest % s.n3) * vec3<u32>(s.y3, s.a3, s.b3); rest /= s.n3;
    at += (rest % s.n4) * vec3<u32>(s.y4, s.a4, s.b4); rest /= s.n4;
    at += (rest % s.n5) * vec3<u32>(s.y5, s.a5, s.b5);
    var right: Y;
    if (SCALAR) {
        right = Y(s.scalar);
    } else {
        right = Y(b[at.z]);
    }
    if (OPERATION == 0) {
        y[at.x] = right;
        return;
    }
    var left: Y;
    if (IN_PLACE) {
        left = y[at.x];
    } else {
        left = Y(a[at.y]);
    }
    switch (OPERATION) {
        case 1: { y[at.x] = left + right; }
        case 2: { y[at.x] = left - right; }
        case 3: { y[at.x] = left * right; }
        default: { y[at.x] = left / right; }
    }
}
