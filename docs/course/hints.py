"""Three hints for each exercise, each saying more than the one before: python docs/course/check.py LESSON --hint 2."""

HINTS = {
    "e01_softmax": (
        "The formula for ∂L/∂x_j at the top of the page is the answer. Which of its letters are dy and y in the code?",
        "The sum over i gives one number per row. Which arguments of .sum keep it a column, so that it broadcasts?",
        "y * (dy - s), where s is (dy * y) summed over the last axis with keepdims=True.",
    ),
    "e02_linear": (
        "Write down the shapes: dy (..., O), x (..., I), weight (O, I). Only one product gives each result's shape.",
        "For dweight, fold the leading axes into one with reshape(-1, width); then it is a product of two matrices.",
        "dweight += rows_of_dy.T @ rows_of_x changes the array you were given; dx is dy @ weight.",
    ),
    "e03_cross_entropy": (
        "Each row is softmax of the logits, minus 1 at its target, all times dnll of the row.",
        "Subtract the row's maximum before exp. Treat the rows whose target is -1 apart: index -1 is the last token.",
        "p[rows, targets[rows]] -= 1 for rows = np.flatnonzero(targets >= 0); multiply by dnll, and by 0 elsewhere.",
    ),
    "e04_rmsnorm": (
        "Compute r first, one number per row; then g = dy * gain. The page's last formula has two terms for dx.",
        "Both means are over the last axis with keepdims=True. The gain's gradient is a sum over rows, and is added.",
        "dx = r * g - r**3 * x * mean(g * x); dgain += (dy * x * r).sum(axis=0); return dx alone.",
    ),
    "e05_attention": (
        "Go from the end: o = p v gives dv and dp; softmax gives ds; s = q k^T / sqrt(D) gives dq and dk.",
        "Transpose the last two axes with a.swapaxes(-1, -2). dv and dk need a transposed matrix, dp a transposed v.",
        "ds = softmax_backward(dp, p) / np.sqrt(D) with D = q.shape[-1]; dq = ds @ k; dk = ds transposed @ q.",
    ),
    "e06_rope": (
        "Backward of a rotation is the rotation by the opposite angle. What changes in the formula for -angle?",
        "cos(-a) = cos(a) and sin(-a) = -sin(a). Split dy into halves as forward splits x.",
        "The first half is da * cos + db * sin, the second db * cos - da * sin; np.concatenate on the last axis.",
    ),
    "e07_online_softmax": (
        "Find the common maximum first. Which factor turns a sum that was scaled by m1 into one scaled by m?",
        "The factor is exp(m1 - m), at most 1, for z and for a; do not divide by z here.",
        "f, g = exp(m1 - m), exp(m2 - m); return m, f * z1 + g * z2, f * a1 + g * a2.",
    ),
    "e08_block": (
        "Read forward from the bottom: the last thing it did was add. Both summands get dy.",
        "Through the block: down.backward first, then norm.backward, each with the stash.",
        "return dy + norm.backward(down.backward(dy, stash), stash)",
    ),
    "e09_adamw": (
        "Four lines: the new m, the new v, their corrected copies, the new w. step starts at 1.",
        "The corrected means are m / (1 - beta1**step) and v / (1 - beta2**step); return the uncorrected m and v.",
        "w * (1 - lr * weight_decay) - lr * mean / (np.sqrt(square) + eps)",
    ),
    "e10_nucleus": (
        "Sort from the most likely token, and add up. Where does the sum first reach top_p?",
        "That token belongs to the nucleus. Count the sums that are below top_p, and keep one more than these.",
        "kept = order[: (running < top_p).sum() + 1]; put p[kept] into zeros at kept; divide by the sum.",
    ),
    "e11_own_op": (
        "The derivative of max(x, 0)^2 is 2 max(x, 0): no case for x < 0 is needed.",
        "In the kernel a thread finds its index i, returns if i >= total, reads x[i] and dy[i] with widen.",
        "i = blockIdx.x * 256 + threadIdx.x, and narrow(A(2) * widen(dy[i]) * max(widen(x[i]), A(0)), dx[i]);",
    ),
    "e12_own_model": (
        "Read Model.forward in own_model.py from the bottom: which part ran last?",
        "d = model.loss.backward(dnll, stash); each further part takes d and returns the next d.",
        "After loss, head and norm: for block in reversed(model.blocks); the embedding is last and returns nothing.",
    ),
}
