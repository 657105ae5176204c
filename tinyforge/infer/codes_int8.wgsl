// Four int8 codes lie in a word, the first in its lowest byte.
fn codes(four: word) -> vec4<real> {
    return vec4<real>(vec4<i32>(vec4<u32>(four << 24u, four << 16u, four << 8u, four)) >> vec4<u32>(24u));
}
