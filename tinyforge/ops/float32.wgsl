fn real_exp(x: real) -> real { return exp(x); }
fn real_log(x: real) -> real { return log(x); }
fn real_tanh(x: real) -> real { return tanh(clamp(x, -15.0, 15.0)); }
