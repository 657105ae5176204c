// 1 / (1 + exp(-x)) with its tail: exp(-|x|) never overflows.
fn sigmoid(x: real) -> real {
    let e = real_exp(-abs(x));
    if (x < 0.0) {
        return e / (real(1.0) + e);
    }
    return real(1.0) / (real(1.0) + e);
}
