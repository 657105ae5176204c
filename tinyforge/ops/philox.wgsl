// Philox 4x32-10, the same bits as tinyforge/rng.py. WGSL multiplies to 32 bits: the high half is put together from
// halves.

fn philox_high(a: u32, b: u32) -> u32 {
    let a0 = a & 0xFFFFu;
    let a1 = a >> 16u;
    let b0 = b & 0xFFFFu;
    let b1 = b >> 16u;
    let low = a0 * b0;
    let middle = a1 * b0 + (low >> 16u);
    let other = a0 * b1 + (middle & 0xFFFFu);
    return a1 * b1 + (middle >> 16u) + (other >> 16u);
}

fn philox(counter: vec4<u32>, key: vec2<u32>) -> vec4<u32> {
    var c = counter;
    var k = key;
    for (var round = 0; round < 10; round++) {
        c = vec4<u32>(philox_high(c.z, 0xCD9E8D57u) ^ c.y ^ k.x, c.z * 0xCD9E8D57u,
                      philox_high(c.x, 0xD2511F53u) ^ c.w ^ k.y, c.x * 0xD2511F53u);
        k += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}
