// y = x m / (1 - p), m from Philox: the same mask as on every backend.

struct Sizes { scale: real, count: u32, threshold: u32, key0: u32, key1: u32 }

@group(0) @binding(0) var<uniform> sizes: Sizes;
@group(0) @binding(1) var<storage, read_write> y: array<real>;
@group(0) @binding(2) var<storage, read> x: array<real>;

// A thread per block of four words.
@compute @workgroup_size(256)
fn dropout(place: Place) {
    let block = item_of(place);
    let words = philox(vec4<u32>(block, 0, 0, 0), vec2<u32>(sizes.key0, sizes.key1));
    for (var i = 0u; i < 4u; i++) {
        let at = 4 * block + i;
        if (at < sizes.count) {
            var kept: real = 0.0;
            if (words[i] >= sizes.threshold) {
                kept = x[at] * sizes.scale;
            }
            y[at] = kept;
        }
    }
}
