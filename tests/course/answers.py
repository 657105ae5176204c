"""Answers to the exercises: slips in the solutions, with words that the message must have, and other right answers.

A slip is (what stands in the solution, what replaces it, words of the message).
"""

from __future__ import annotations

SUM = "(dy * y).sum(axis=-1, keepdims=True)"
DX = "r * dn - r**3 * x * (dn * x).mean(axis=-1, keepdims=True)"
DP, DS = "dp = do @ v.swapaxes(-1, -2)", "softmax_backward(dp, p) / np.sqrt(q.shape[-1])"
TURNED = "[da * cos + db * sin, db * cos - da * sin]"
MERGED = "m, f * z1 + g * z2, f * a1 + g * a2"
BLOCK = "    dh = down.backward(dy, stash)\n    return dy + norm.backward(dh, stash)\n"
NEW_V = "config.beta2 * v + (1 - config.beta2) * grad**2"
WEIGHT = "w * (1 - lr * config.weight_decay) - lr * mean / (np.sqrt(square) + config.eps)"
KEPT = "np.searchsorted(np.cumsum(p[order]), top_p * (1 - 1e-15)) + 1"

WRONG: dict[str, list[tuple[str, str, str]]] = {
    "e01_softmax": [
        (f"(dy - {SUM})", "dy", "the sum over the row is missing"),
        ("(dy * y).sum", "dy.sum", "the sum lacks the factor y"),
        ("sum(axis=-1, keepdims=True)", "sum()", "the whole array"),
        ("sum(axis=-1", "sum(axis=0", "down the columns"),
        ("sum(axis=-1", "mean(axis=-1", "a mean in place of the sum"),
        ("return y *", "return", "the factor y in front"),
        (f"y * (dy - {SUM})", "y * (1 - y) * dy", "diagonal"),
        (f"(dy - {SUM})", f"({SUM} - dy)", "the sign is wrong"),
        (", keepdims=True", "", "keepdims=True keeps its axis"),
        (f"y * (dy - {SUM})", f"y * dy - {SUM}", "it multiplies the whole bracket"),
        (f"y * (dy - {SUM})", "y * (1 - y)", "dy is missing"),
        ("return y", "y", "returned None"),
        ("sum(axis=-1", "sum(axis=1", "along the second axis"),
        (
            f"return y * (dy - {SUM})",
            "dx, s = 0 * y, (dy * y).sum(axis=-1, keepdims=True)\n    for i in range(y.shape[-1]):\n"
            "        dx[:, i] = (y * (dy - s))[:, i]\n    return dx",
            "(..., C) is any number of axes",
        ),
    ],
    "e02_linear": [
        ("dweight += rows.T @ x.reshape(-1, x.shape[-1])", "dweight[...] = rows.T @ x.reshape(-1, 5)", "was assigned"),
        ("dweight +=", "dweight = dweight +", "nothing was added"),
        ("dweight +=", "dweight -=", "was subtracted"),
        (
            "    dweight += rows.T @ x.reshape(-1, x.shape[-1])\n    return dy @ weight",
            "    return dy @ weight, rows.T @ x.reshape(-1, x.shape[-1])",
            "it was returned instead",
        ),
        ("rows.T @ x.reshape(-1, x.shape[-1])", "dy[0].T @ x[0]", "first batch row alone"),
        ("dweight +=", "dweight += 2 *", "added twice"),
        ("x.reshape(-1, x.shape[-1])", "x.reshape(-1, x.shape[-1]) / len(rows)", "a mean over the rows"),
        ("return dy @ weight", "return -dy @ weight", "the sign is wrong"),
        ("rows.T @ x", "dy.reshape(dy.shape[-1], -1) @ x", "does not transpose"),
        ("return dy @ weight", "return x", "this is x"),
        ("dy @ weight", "(rows @ weight).T", "expected (2, 3, 5)"),
        ("dy @ weight", "dy @ weight.T", "the last axis of a must be as long"),
        ("dy @ weight", "dy.dot(weight.T)", "in np.dot(a, b)"),
        ("rows.T @ x.reshape(-1, x.shape[-1])", "dy.sum((0, 1))[:, None] * x.sum((0, 1))", "summed before the product"),
        ("rows.T @ x.reshape(-1, x.shape[-1])", "(dy.swapaxes(-1, -2) @ x).sum(axis=0)", "only the first leading axis"),
        ("rows.T @ x.reshape(-1, x.shape[-1])", "dy.swapaxes(-1, -2) @ x", "folds the leading ones"),
        (
            "rows.T @ x.reshape(-1, x.shape[-1])",
            "__import__('numpy').einsum('bto,bti->oi', dy, x)",
            "any number of leading axes",
        ),
    ],
    "e03_cross_entropy": [
        ("np.where(seen, dnll, 0)", "dnll", "rows whose target is -1 must be 0"),
        (
            "p[np.flatnonzero(seen), targets[seen]] -= 1\n    return np.where(seen, dnll, 0)",
            "p[np.arange(6), targets] -= 1\n    return dnll",
            "-1 counts as the last token",
        ),
        (" -= 1", " -= 0", "the 1 of the target is not subtracted"),
        ("np.where(seen, dnll, 0)[:, None] * p", "np.where(seen, 1, 0)[:, None] * p", "dnll is missing"),
        ("logits - logits.max(axis=-1, keepdims=True)", "logits", "softmax without the shift"),
        ("e.sum(axis=-1, keepdims=True)", "e.sum(axis=0)", "entries are wrong"),
        (")[:, None] * p", ")[:, None] * p / len(p)", "divided by the number of rows"),
        ("[:, None] * p", "[:, None] * -p", "the sign is wrong"),
        ("p = e / e.sum(axis=-1, keepdims=True)", "p = logits.copy()", "in place of their softmax"),
        ("e / e.sum(axis=-1, keepdims=True)", "np.exp(logits) / np.exp(logits).sum()", "over the whole array"),
        ("-= 1", "+= 1", "1 is added at the target"),
        ("logits.max(axis=-1, keepdims=True)", "logits.max()", "the maximum of each row"),
        ("p[np.flatnonzero(seen), targets[seen]]", "p[:, targets]", "`p[:, targets]` is whole columns"),
        ("p[np.flatnonzero(seen), targets[seen]]", "p[:, targets[seen]]", "`p[:, targets]` is whole columns"),
    ],
    "e04_rmsnorm": [
        (f"dx = {DX}", "dx = r * dn", "second term is missing"),
        ("r**3", "r**2", "r^2 in place of r^3"),
        ("r**3", "r", "r in place of r^3"),
        ("(dn * x).mean(axis=-1, keepdims=True)", "(dn * x).mean(axis=0)", "down the columns"),
        ("(dn * x).mean(axis=-1, keepdims=True)", "(dn * x).mean()", "the mean of g x runs over the whole array"),
        (f"dx = {DX}", "dx = r * dn * (1 - (r * x) ** 2)", "own x alone"),
        (f"dx = {DX}", "dx = gain * x * r", "this is y"),
        ("sum(axis=0)", "sum()", "summed over everything"),
        ("(x * x).mean", "(x * x).sum", "a sum in place of the mean of squares"),
        ("dn = dy * gain", "dn = dy", "the gain is missing"),
        ("(dn * x).mean", "(dy * x).mean", "the gain is missing in the second term"),
        ("(dn * x).mean", "(dn * x).sum", "a sum in place of the mean"),
        (" + eps", "", "eps is missing"),
        (
            "np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)",
            "((x * x).mean(-1, keepdims=True) ** 0.5 + eps)",
            "outside of",
        ),
        (".mean(axis=-1, keepdims=True) + eps", ".mean() + eps", "over the whole array"),
        ("r * dn - ", "r * dn + ", "the two terms are added"),
        ("(dy * x * r)", "(dy * x)", "the factor r is missing"),
        ("(dy * x * r)", "(dn * x * r)", "the gain is a factor too many"),
        ("dgain +=", "dgain[...] =", "was assigned"),
        (
            "    dgain += (dy * x * r).sum(axis=0)\n    return dx",
            "    return dx, (dy * x * r).sum(axis=0)",
            "it was returned instead",
        ),
    ],
    "e05_attention": [
        ("p.swapaxes(-1, -2) @ do", "p @ do", "p must be transposed"),
        (f"ds = {DS}", "ds = softmax_backward(dp, p)", "the scale 1 / sqrt(D) is missing"),
        ("np.sqrt(q.shape[-1])", "q.shape[-1]", "the scale is 1 / D"),
        ("softmax_backward(dp, p)", "dp", "softmax's backward is missing"),
        ("softmax_backward(dp, p)", "(p * dp)", "lacks its sum"),
        ("softmax_backward(dp, p)", "(p * (dp - (p * dp).sum(-2, keepdims=True)))", "sums down the columns"),
        ("softmax_backward(dp, p)", "(p * (dp - (p * dp).sum()))", "sums over the whole array"),
        ("softmax_backward(dp, p)", "softmax_backward(p, dp)", "wrong order: it is (dy, y)"),
        ("ds @ k, ds.swapaxes(-1, -2) @ q, dv", "ds.swapaxes(-1, -2) @ q, ds @ k, dv", "the order is dq, dk, dv"),
        ("ds.swapaxes(-1, -2) @ q", "ds @ q", "must be transposed"),
        ("ds @ k,", "ds @ q,", "q and k are exchanged"),
        ("return ds @ k, ds", "return -ds @ k, ds", "the sign is wrong"),
        ("return ds @ k, ds.swapaxes(-1, -2) @ q, dv", "return dv", "got one array of shape (2, 6, 4)"),
        (DP, "dp = do @ v.T", "a.T turns all axes"),
        (DP, "dp = v @ do.swapaxes(-1, -2)", "this is its transpose"),
        ("/ np.sqrt(q.shape[-1])", "* np.sqrt(q.shape[-1])", "not multiplied"),
        ("p.swapaxes(-1, -2) @ do", "p.swapaxes(-1, -2) @ v", "v in place of do"),
    ],
    "e06_rope": [
        (TURNED, "[da * cos - db * sin, da * sin + db * cos]", "forward's rotation"),
        ("db * cos - da * sin", "db * cos + da * sin", "only the first half is turned back"),
        ("da * cos + db * sin", "da * cos - db * sin", "only the second half is turned back"),
        (TURNED, "[db * cos - da * sin, da * cos + db * sin]", "the two halves are exchanged"),
        (TURNED, "[da * cos, db * cos]", "the parts with the sine are missing"),
        (TURNED, "[da * sin + db * cos, db * sin - da * cos]", "sine and cosine are exchanged"),
        (f"np.concatenate({TURNED}, axis=-1)", "dy", "dy is not rotated"),
        ("np.split(dy, 2, axis=-1)", "np.split(dy, 2)", "unless it is given axis=-1"),
        (
            f"np.concatenate({TURNED}, axis=-1)",
            f"np.stack({TURNED}, axis=-1).reshape(dy.shape)",
            "the pairs are mixed in the result",
        ),
        ("db * cos - da * sin", "da * sin - db * cos", "the sign of the second half"),
        ("np.split(dy, 2, axis=-1)", "dy[:, ::2], dy[:, 1::2]", "entry i and entry i + D/2"),
        (TURNED, "[da / cos + db / sin, db / cos - da / sin]", "not divided by"),
        (
            f"return np.concatenate({TURNED}, axis=-1)",
            "da[...] = da * cos + db * sin\n    db[...] = db * cos - da * sin\n    return dy",
            "reads what was just written",
        ),
        (
            f"da, db = np.split(dy, 2, axis=-1)\n    return np.concatenate({TURNED}, axis=-1)",
            f"da, db = dy[:, ::2], dy[:, 1::2]\n    return np.stack({TURNED}, axis=-1).reshape(dy.shape)",
            "half a vector apart",
        ),
    ],
    "e07_online_softmax": [
        ("np.maximum(m1, m2)", "m1", "m of the first tile"),
        ("np.maximum(m1, m2)", "np.minimum(m1, m2)", "larger of the two"),
        ("np.maximum(m1, m2)", "m1 + m2", "m1 + m2"),
        ("np.maximum(m1, m2)", "(m1 + m2) / 2", "the mean of m1 and m2"),
        ("np.exp(m1 - m), np.exp(m2 - m)", "np.exp(m1 - m2), np.exp(m2 - m1)", "with the other's maximum"),
        (MERGED, "m, z1 + z2, a1 + a2", "tile is not scaled to the common maximum"),
        (MERGED, "m, f * z1 + z2, f * a1 + a2", "tile is not scaled"),
        (MERGED, "m, z1 + g * z2, a1 + g * a2", "tile is not scaled"),
        ("f, g =", "g, f =", "the factors are exchanged"),
        ("np.exp(m1 - m), np.exp(m2 - m)", "np.exp(m - m1), np.exp(m - m2)", "upside down"),
        ("np.exp(m1 - m), np.exp(m2 - m)", "np.exp(m1), np.exp(m2)", "without the maximum"),
        ("np.exp(m1 - m), np.exp(m2 - m)", "np.exp(m1) / np.exp(m), np.exp(m2) / np.exp(m)", "write exp(m1 - m)"),
        (MERGED, "m, f * z1 + g * z2, (f * a1 + g * a2) / (f * z1 + g * z2)", "divided by z already"),
        (f"return {MERGED}", "return f * z1 + g * z2", "got float64"),
        (f"return {MERGED}", "pass", "got None; does the function end with `return`?"),
    ],
    "e08_block": [
        ("return dy + norm", "return norm", "dy, is missing"),
        (BLOCK, "    return dy\n", "never called"),
        ("return dy + norm.backward(dh, stash)", "norm.backward(dh, stash)\n    return dy + dh", "before the norm"),
        ("return dy +", "return 2 * dy +", "dy was added twice"),
        ("return dy +", "return dh +", "dh, the gradient inside"),
        ("return dy + norm", "return dy + 2 * norm", "block's gradient was added twice"),
        ("return dy +", "return dy *", "must be added"),
        (BLOCK, "    return dy + down.backward(norm.backward(dy, stash), stash)\n", "reverse order of forward"),
        ("return dy + norm.backward(dh, stash)", "return dy + dh", "the backward of RMSNorm was never called"),
        ("return dy + norm.backward(dh, ", "return norm.backward(dh + dy, ", "dy went through the norm too"),
        ("norm.backward(dh, ", "norm.backward(dh + dy, ", "dy was added on both sides"),
        ("return dy +", "return dy + dh +", "dh was added too"),
        ("    return dy +", "    norm.backward(dh, stash)\n    return dy +", "empty stash"),
    ],
    "e09_adamw": [
        ("/ (1 - config.beta2**step)", "", "the correction of v is missing"),
        ("m / (1 - config.beta1**step)", "m", "the correction of m is missing"),
        (NEW_V, "config.beta2 * v + (1 - config.beta2) * grad", "the square of g is missing"),
        ("(np.sqrt(square) + config.eps)", "np.sqrt(square + config.eps)", "eps is under the root"),
        (" + config.eps", "", "eps is missing"),
        ("w * (1 - lr * config.weight_decay)", "w", "the weight decay is missing"),
        ("1 - lr * config.weight_decay", "1 - config.weight_decay", "the decay lacks the learning rate"),
        ("    m = ", "    grad = grad + config.weight_decay * w\n    m = ", "the decay was added to g"),
        ("(1 - config.beta1) * grad", "grad", "the factor 1 - beta1 is missing"),
        ("return ", "m = m / (1 - config.beta1**step)\n    return ", "m was divided by 1 - beta1"),
        ("- lr * mean", "+ lr * mean", "uphill"),
        ("np.sqrt(square)", "square", "the root is missing"),
        (" - lr * mean", " - lr * mean if step > 1 else w - lr * mean", "w[0] after step 3"),
        ("lr * mean / (np.sqrt(square) + config.eps)", "lr * grad", "this is gradient descent"),
        ("    w = w", "    w + w", "w is the old one"),
        ("return w, m, v", "return w", "got one array of shape (9,)"),
        ("return w, m, v", "return m, v, w", "this is v: the order is w, m, v"),
        ("**step", "", "the corrections have no power"),
        ("**step", " * step", "it is a power"),
        ("**step", "**(step + 1)", "one step too late"),
        ("**step", "**(step - 1)", "one step too early"),
        ("/ (1 - config.beta", "* (1 - config.beta", "the corrections multiply"),
        ("lr * mean", "lr * grad", "g in place of the mean"),
        ("lr * mean", "mean", "the step lacks the learning rate"),
        ("(1 - lr * config", "(1 + lr * config", "the decay enlarges"),
        (
            "w * (1 - lr * config.weight_decay) - lr * mean / (np.sqrt(square) + config.eps)",
            "(w - lr * mean / (np.sqrt(square) + config.eps)) * (1 - lr * config.weight_decay)",
            "the decay shrinks the step too",
        ),
        ("return w, m, v", "pass", "got None"),
    ],
    "e10_nucleus": [
        (KEPT, "(np.cumsum(p[order]) <= top_p).sum()", "as it is with `cumsum <= top_p`"),
        (KEPT, "(np.cumsum(p[order]) < top_p).sum()", "`cumsum"),
        (KEPT, "np.argmax(np.cumsum(p[order]) >= top_p) + 1", "and never reaches 1.0"),
        (
            f"order = np.argsort(-p)\n    kept = {KEPT}",
            "order = np.argsort(p)\n    kept = (np.cumsum(p[order]) <= top_p).sum()",
            "of the least likely tokens first",
        ),
        (" + 1\n", " + 2\n", "one token too many"),
        ("return cut / cut.sum()", "return cut", "not divided by their sum"),
        ("cut[order[:kept]] =", "cut[:kept] =", "keeps its place"),
        ("np.argsort(-p)", "np.argsort(p)", "sort from the most likely one"),
        (f"kept = {KEPT}", "kept = len(p)", "nothing was cut"),
        ("return cut / cut.sum()", "return p[order]", "nothing was cut, and the tokens are sorted"),
        ("return cut / cut.sum()", "return p[order[:kept]]", "got 3 numbers, expected 20"),
        ("cut[order[:kept]] = p[order[:kept]]", "cut[order[:kept]] = 1", "has an equal share"),
        ("return cut", "cut = np.where(np.cumsum(p) <= top_p, p, 0)\n    return cut", "over p as it is"),
        (f"kept = {KEPT}", "kept = 1", "only the most likely token"),
        (
            f"    kept = {KEPT}\n",
            "    values = np.unique(p)[::-1]\n"
            "    kept = (p >= values[(values.cumsum() < top_p - 1e-12)[:-1].sum()]).sum()\n",
            "where tokens are tied",
        ),
        ("return cut / cut.sum()", "cut = p * (p >= 1 - top_p)\n    return cut / cut.sum()", "without a running sum"),
    ],
    "e11_own_op": [
        ("2 * dy", "dy", "0.5 times"),
        ("2 * dy * np.maximum(x, 0)", "2 * dy * x", "x must be cut at 0"),
        ("2 * dy * np.maximum(x, 0)", "2 * dy * (x > 0)", "its value is not"),
        ("2 * dy * np.maximum(x, 0)", "dy * (x > 0)", "not of its square"),
        ("2 * dy * np", "2 * np", "dy is missing"),
        ("np.maximum(x, 0)\n", "np.maximum(x, 0) ** 2\n", "the square was kept"),
        ("2 * dy * np.maximum(x, 0)", "2 * dy * np.abs(x)", "|x| in place of"),
        ("np.maximum(x, 0)\n", "max(x, 0)\n", "np.maximum and np.where go entry by entry"),
        ("return 2 *", "return -2 *", "the sign is wrong"),
    ],
    "e12_own_model": [
        ("    d = model.norm.backward(d, stash)\n", "", "reverse order of forward"),
        ("reversed(model.blocks)", "model.blocks", "reverse order of forward"),
        ("    model.embedding.backward(d, stash)\n", "", "the backward of embedding was never called"),
        (
            "    for block in reversed(model.blocks):\n        d = block.backward(d, stash)\n",
            "",
            "reverse order of forward",
        ),
        ("    model.embedding.backward(d, stash)\n", "    model.embedding.backward(d, stash)\n" * 2, "empty stash"),
        ("backward(dnll, stash)", "backward(abs(dnll), stash)", "finite differences"),
        ("backward(dnll, stash)", "backward(-dnll, stash)", "the sign is wrong"),
        ("embedding.backward(d, ", "embedding.backward(0 * d, ", "embedding: its gradient is 0"),
        ("        d = block", "        block", "finite differences"),
        ("        d = block.backward", "        d = d + block.backward", "has the stream's part already"),
        ("        d = block", "        block", "the blocks' results are not used"),
        ("backward(dnll, stash)", "backward(dnll / dnll.size, stash)", "divided by its size"),
        ("backward(dnll, stash)", "backward(dnll.mean(), stash)", "the mean of dnll was used"),
        ("backward(dnll, stash)", "backward(dnll.sum(), stash)", "the sum of dnll was used"),
        ("backward(dnll, stash)", "backward(0 * dnll + 1, stash)", "ones in place of dnll"),
        (
            "        d = block.backward(d",
            "        first = d if block is model.blocks[-1] else first\n        d = block.backward(first",
            "got the same d",
        ),
        ("    d = model.loss", "    model.grads[...] = 0\n    d = model.loss", "finite differences"),
    ],
}
# Slips in the CUDA kernel of lesson 11.
KERNELS = [
    ("    if (i >= total) return;\n", "", "past the end"),
    ("i >= total", "i + 1 >= total", "unwritten"),
    ("(r < A(0) ? A(0) : r)", "r", "x must be cut at 0"),
    ("widen(dy[i]) * ", "", "dy is missing"),
    ("A(2) * ", "", "0.5 times"),
    ("(r < A(0) ? A(0) : r)", "max(r, 0)", "ambiguous|more than one instance"),
    ("dx[i]", "dx[0]", "unwritten"),
    ("narrow(", "narow(", "does not compile"),
    ("blockIdx.x * 256 + threadIdx.x", "threadIdx.x", "unwritten"),
]

# Each is the body of a module: in place, with einsum, with loops, with float32 where it does no harm.
RIGHT: dict[str, list[str]] = {
    "e01_softmax": [
        """def softmax_backward(dy, y):
    s = np.einsum("...i,...i->...", dy, y)
    return y * (dy - s[..., None])
""",
        "def softmax_backward(dy, y):\n    dy -= (dy * y).sum(-1, keepdims=True)\n    dy *= y\n    return dy\n",
        """def softmax_backward(dy, y):
    dx = np.empty_like(dy)
    for i in np.ndindex(dy.shape[:-1]):
        dx[i] = y[i] * (dy[i] - sum(dy[i] * y[i]))
    return dx
""",
        """def softmax_backward(dy, y):
    dy, y = dy.astype(np.float32), y.astype(np.float32)
    return y * (dy - (dy * y).sum(-1, keepdims=True))
""",
    ],
    "e02_linear": [
        """def linear_backward(dweight, dy, x, weight):
    dweight += np.einsum('no,ni->oi', dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
    return np.einsum('...o,oi->...i', dy, weight)
""",
        """def linear_backward(dweight, dy, x, weight):
    for i in np.ndindex(dy.shape[:-1]):
        dweight += np.outer(dy[i], x[i])
    return dy @ weight
""",
        """def linear_backward(dweight, dy, x, weight):
    leading = list(range(dy.ndim - 1))
    np.add(dweight, np.tensordot(dy, x, axes=(leading, leading)), out=dweight)
    return np.tensordot(dy, weight, 1)
""",
        """def linear_backward(dweight, dy, x, weight):
    dy = dy.astype(np.float32)
    dweight[...] = dweight + dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
    return dy @ weight
""",
    ],
    "e03_cross_entropy": [
        """def cross_entropy_backward(dnll, logits, targets):
    logits -= logits.max(axis=-1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=-1, keepdims=True)
    for row, t in enumerate(targets):
        if t < 0:
            logits[row] = 0
        else:
            logits[row, t] -= 1
    logits *= dnll[:, None]
    return logits
""",
        """def cross_entropy_backward(dnll, logits, targets):
    out = np.zeros_like(logits)
    for n, (z, t) in enumerate(zip(logits, targets)):
        if t != -1:
            e = np.exp(z - max(z))
            out[n] = dnll[n] * (e / sum(e) - (np.arange(len(z)) == t))
    return out
""",
        """def cross_entropy_backward(dnll, logits, targets):
    shift = logits.max(axis=-1, keepdims=True).astype(np.float32)
    e = np.exp(logits - shift)
    hit = targets[:, None] == np.arange(logits.shape[1])
    return np.einsum('n,nv->nv', dnll * (targets >= 0), e / e.sum(-1, keepdims=True) - hit)
""",
        """def cross_entropy_backward(dnll, logits, targets):
    log = logits - logits.max(-1, keepdims=True)
    p = np.exp(log - np.log(np.exp(log).sum(-1, keepdims=True)))
    p -= np.eye(logits.shape[1])[targets]
    p[targets == -1] = 0
    return p * dnll[:, None]
""",
    ],
    "e04_rmsnorm": [
        """def rmsnorm_backward(dgain, dy, gain, x, eps):
    r = (np.einsum('nc,nc->n', x, x) / x.shape[1] + eps) ** -0.5
    dgain += np.einsum('nc,nc,n->c', dy, x, r)
    mean = np.einsum('nc,c,nc->n', dy, gain, x) / x.shape[1]
    return r[:, None] * dy * gain - (r**3 * mean)[:, None] * x
""",
        """def rmsnorm_backward(dgain, dy, gain, x, eps):
    dx = np.empty_like(x)
    for i in range(len(x)):
        r = 1 / np.sqrt(np.mean(x[i] ** 2) + eps)
        dgain += dy[i] * x[i] * r
        dn = dy[i] * gain
        dx[i] = r * (dn - r**2 * x[i] * np.mean(dn * x[i]))
    return dx
""",
        """def rmsnorm_backward(dgain, dy, gain, x, eps):
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    x *= r
    dgain += (dy * x).sum(0)
    dy *= gain
    dy -= x * (dy * x).mean(-1, keepdims=True)
    dy *= r
    return dy
""",
        """def rmsnorm_backward(dgain, dy, gain, x, eps):
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    n = (x * r).astype(np.float32)
    dgain += (dy * n).sum(0)
    dn = dy * gain
    return r * (dn - n * (dn * n).mean(-1, keepdims=True))
""",
    ],
    "e05_attention": [
        """def attention_backward(do, q, k, v, p, softmax_backward):
    scale = q.shape[-1] ** -0.5
    ds = scale * softmax_backward(np.einsum('btd,bsd->bts', do, v), p)
    return (np.einsum('bts,bsd->btd', ds, k), np.einsum('bts,btd->bsd', ds, q), np.einsum('bts,btd->bsd', p, do))
""",
        """def attention_backward(do, q, k, v, p, softmax_backward):
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(len(q)):
        for t in range(q.shape[1]):
            dp = v[b] @ do[b, t]
            ds = p[b, t] * (dp - p[b, t] @ dp) / np.sqrt(q.shape[2])
            dq[b, t] = ds @ k[b]
            dk[b] += np.outer(ds, q[b, t])
            dv[b] += np.outer(p[b, t], do[b, t])
    return dq, dk, dv
""",
        """def attention_backward(do, q, k, v, p, softmax_backward):
    dv = p.transpose(0, 2, 1) @ do
    delta = (do * (p @ v)).sum(-1, keepdims=True)
    p *= do @ v.transpose(0, 2, 1) - delta
    p /= np.sqrt(q.shape[-1])
    return [p @ k, p.transpose(0, 2, 1) @ q, dv]
""",
        """def attention_backward(do, q, k, v, p, softmax_backward):
    root = np.float32(q.shape[-1]) ** np.float32(0.5)
    ds = softmax_backward(np.matmul(do, np.moveaxis(v, 1, 2)), p) / root
    return ds @ k, np.moveaxis(ds, 1, 2) @ q, np.moveaxis(p, 1, 2) @ do
""",
    ],
    "e06_rope": [
        """def rotate_backward(dy, cos, sin):
    half = dy.shape[-1] // 2
    a, b = dy[..., :half].copy(), dy[..., half:].copy()
    dy[..., :half] = a * cos + b * sin
    dy[..., half:] = b * cos - a * sin
    return dy
""",
        """def rotate_backward(dy, cos, sin):
    turn = np.array([[cos, sin], [-sin, cos]])
    return np.einsum('ijtd,jtd->tid', turn, np.moveaxis(dy.reshape(len(dy), 2, -1), 1, 0)).reshape(dy.shape)
""",
        """def rotate_backward(dy, cos, sin):
    dx, d = np.empty_like(dy), cos.shape[1]
    for t in range(len(dy)):
        for i in range(d):
            dx[t, i] = dy[t, i] * cos[t, i] + dy[t, i + d] * sin[t, i]
            dx[t, i + d] = dy[t, i + d] * cos[t, i] - dy[t, i] * sin[t, i]
    return dx
""",
        """def rotate_backward(dy, cos, sin):
    a, b = np.split(dy, 2, axis=-1)
    z = (a + 1j * b) * (cos - 1j * sin)
    return np.hstack([z.real, z.imag]).astype(np.float32)
""",
    ],
    "e07_online_softmax": [
        """def merge(first, second):
    m = max(first[0], second[0])
    scales = [np.exp(part[0] - m) for part in (first, second)]
    l, o = (sum(s * part[i] for s, part in zip(scales, (first, second))) for i in (1, 2))
    return m, l, o
""",
        """def merge(first, second):
    (m1, l1, o1), (m2, l2, o2) = first, second
    if m1 < m2:
        m1, l1, o1, m2, l2, o2 = m2, l2, o2, m1, l1, o1
    b = np.exp(m2 - m1)
    return [m1, l1 + b * l2, o1 + b * o2]
""",
        """def merge(first, second):
    (m1, l1, o1), (m2, l2, o2) = first, second
    m = max(m1, m2)
    o1 *= np.exp(m1 - m)
    o1 += np.exp(m2 - m) * o2
    return m, l1 * np.exp(m1 - m) + l2 * np.exp(m2 - m), o1
""",
        """def merge(first, second):
    ms, ls, os = (np.array(part) for part in zip(first, second))
    scale = np.exp(ms - ms.max())
    return ms.max(), np.einsum('i,i->', scale, ls), np.einsum('i,id->d', scale, os).astype(np.float32)
""",
    ],
    "e08_block": [
        "def block_backward(norm, down, dy, stash):\n    return norm.backward(down.backward(dy, stash), stash) + dy\n",
        """def block_backward(norm, down, dy, stash):
    dy += norm.backward(down.backward(dy, stash), stash)
    return dy
""",
        """def block_backward(norm, down, dy, stash):
    dx = dy.copy()
    for op in (down, norm):
        dy = op.backward(dy, stash)
    dx += dy
    return dx
""",
        """def block_backward(norm, down, dy, stash):
    through = norm.backward(down.backward(dy, stash), stash)
    return np.add(dy, through, out=through)
""",
        """def block_backward(norm, down, dy, stash):
    through = norm.backward(down.backward(dy, stash), stash)
    return np.einsum('i...->...', np.stack([dy, through]))
""",
    ],
    "e09_adamw": [
        """def adamw(w, m, v, grad, step, lr, config):
    m *= config.beta1
    m += (1 - config.beta1) * grad
    v *= config.beta2
    v += (1 - config.beta2) * grad * grad
    w *= 1 - lr * config.weight_decay
    w -= lr * (m / (1 - config.beta1**step)) / (np.sqrt(v / (1 - config.beta2**step)) + config.eps)
    return w, m, v
""",
        """def adamw(w, m, v, grad, step, lr, config):
    new = [np.empty_like(w) for _ in range(3)]
    for i in range(len(w)):
        new[1][i] = config.beta1 * m[i] + (1 - config.beta1) * grad[i]
        new[2][i] = config.beta2 * v[i] + (1 - config.beta2) * grad[i] ** 2
        mean, square = new[1][i] / (1 - config.beta1**step), new[2][i] / (1 - config.beta2**step)
        new[0][i] = w[i] - lr * config.weight_decay * w[i] - lr * mean / (square**0.5 + config.eps)
    return new
""",
        """def adamw(w, m, v, grad, step, lr, config):
    m = m + (1 - config.beta1) * (grad - m)
    v = v + (1 - config.beta2) * (np.square(grad) - v)
    root = np.sqrt(1 - config.beta2**step)
    rate = lr * root / (1 - config.beta1**step)
    return w * (1 - lr * config.weight_decay) - rate * m / (np.sqrt(v) + config.eps * root), m, v
""",
        """def adamw(w, m, v, grad, step, lr, config):
    m, v = (np.einsum('i,ij->j', [b, 1 - b], np.stack([old, new])) for b, old, new in
            ((config.beta1, m, grad), (config.beta2, v, grad**2)))
    update = (m / (1 - config.beta1**step)) / (np.sqrt(v / (1 - config.beta2**step)) + config.eps)
    return w * (1 - lr * config.weight_decay) - lr * update.astype(np.float32), m, v
""",
    ],
    "e10_nucleus": [
        """def nucleus(p, top_p):
    order = np.argsort(p)[::-1]
    total = 0.0
    kept = []
    for i in order:
        if total >= top_p - 1e-12:
            break
        kept.append(i)
        total += p[i]
    out = np.zeros(len(p))
    out[kept] = p[kept] / sum(p[kept])
    return out
""",
        """def nucleus(p, top_p):
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p - 1e-12]] = 0
    p /= p.sum()
    return p
""",
        """def nucleus(p, top_p):
    s = np.sort(p)[::-1]
    cut = np.where(p >= s[(np.cumsum(s) < top_p - 1e-12).sum()], p, 0)
    return cut / cut.sum()
""",
        """def nucleus(p, top_p):
    heavier = np.array([p[(p > x)].sum() for x in p])
    cut = np.where(heavier < top_p - 1e-12, p, 0)
    return cut / np.einsum('i->', cut)
""",
        """def nucleus(p, top_p):
    order = np.argsort(-p.astype(np.float32), kind='stable')
    kept = order[: (np.cumsum(p[order]) < top_p - 1e-12).sum() + 1]
    cut = np.zeros_like(p)
    cut[kept] = p[kept]
    return cut / cut.sum()
""",
    ],
    "e11_own_op": [
        "    return np.where(x > 0, 2 * x * dy, 0)\n",
        "    dx = np.maximum(x, 0)\n    dx *= dy\n    dx *= 2\n    return dx\n",
        "    return np.einsum('...,...,...->...', dy, x, (2 * (x > 0)).astype(x.dtype))\n",
        "    return dy * (x + np.abs(x))\n",
        "    return (2 * dy * x.clip(0)).astype(np.float32)\n",
    ],
    "e12_own_model": [
        """def model_backward(model, dnll, stash):
    d = dnll
    for part in (model.loss, model.head, model.norm, *model.blocks[::-1], model.embedding):
        d = part.backward(d, stash)
""",
        """def model_backward(model, dnll, stash):
    d = model.norm.backward(model.head.backward(model.loss.backward(dnll, stash), stash), stash)
    i = len(model.blocks)
    while i:
        i -= 1
        d = model.blocks[i].backward(d, stash)
    model.embedding.backward(d, stash)
""",
        """def model_backward(model, dnll, stash):
    from functools import reduce
    parts = [model.embedding, *model.blocks, model.norm, model.head, model.loss]
    reduce(lambda d, part: part.backward(d, stash), reversed(parts), dnll)
""",
        """def model_backward(model, dnll, stash):
    parts = [model.embedding, *model.blocks, model.norm, model.head, model.loss]
    while parts:
        dnll = parts.pop().backward(dnll, stash)
""",
    ],
}
