// WGSL's functions end at 32 bits. These are for checking gradients; their errors are some 2^-52.

fn real_power_of_two(n: i32) -> f64 {
    var rest = n;
    var y: f64 = 1.0lf;
    for (var part = 0; part < 9; part++) {
        let step = clamp(rest, -126, 126);
        y *= f64(ldexp(1.0f, step));
        rest -= step;
    }
    return y;
}

// exp(n log 2 + r), |r| <= log(2) / 2, by r's Taylor series.
fn real_exp(x: f64) -> f64 {
    let bounded = clamp(x, -745.2lf, 709.78lf);
    let n = round(bounded * 1.4426950408889634lf);
    let r = (bounded - n * 0.693147180369123816490lf) - n * 1.90821492927058770002e-10lf;
    var y: f64 = 1.0lf;
    for (var i = 14; i > 0; i--) {
        y = 1.0lf + y * r / f64(i);
    }
    return y * real_power_of_two(i32(n));
}

// From a 32-bit start by Halley's method for exp(y) = x.
fn real_log(x: f64) -> f64 {
    var scaled = x;
    var y: f64 = 0.0lf;
    while (scaled > 1e30lf) { scaled *= 7.8886090522101181e-31lf; y += 69.314718055994530942lf; }
    while (scaled < 1e-30lf && scaled > 0.0lf) { scaled *= 1.2676506002282294e30lf; y -= 69.314718055994530942lf; }
    var z = f64(log(f32(scaled)));
    for (var i = 0; i < 2; i++) {
        let e = real_exp(z);
        z += 2.0lf * (scaled - e) / (scaled + e);
    }
    return y + z;
}

fn real_tanh(x: f64) -> f64 {
    if (abs(x) < 0.05lf) {
        let s = x * x;
        return x * (1.0lf - s * (1.0lf / 3.0lf - s * (2.0lf / 15.0lf - s * (17.0lf / 315.0lf - s * (62.0lf / 2835.0lf
            - s * 1382.0lf / 155925.0lf)))));
    }
    let e = real_exp(2.0lf * clamp(x, -20.0lf, 20.0lf));
    return (e - 1.0lf) / (e + 1.0lf);
}
