// A word is four numbers.
fn codes(four: word) -> vec4<real> {
    return four;
}
