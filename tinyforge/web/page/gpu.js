// The decoder by WebGPU: launches decode.wgsl, five times a layer, and reads back the logits alone.

const ROWS = 16;  // positions of a prompt in one pass
const SLOT = 256;  // bytes of a kernel's sizes: a multiple of every device's alignment
const KINDS = ["qkv", "attend", "out", "gate_up", "down", "head"];

/* A decoder on this browser's GPU, or the reason why there is none: {decoder} or {reason}, "" where the browser offers
   no GPU. software: take one that a CPU imitates, which is slower than JavaScript. */
export async function gpuDecoder(shape, tensors, software) {
  const adapter = await navigator.gpu?.requestAdapter({ powerPreference: "high-performance" }).catch(() => null);
  if (!adapter || ((adapter.info?.isFallbackAdapter ?? adapter.isFallbackAdapter) && !software)) return { reason: "" };
  const { maxBufferSize, maxStorageBufferBindingSize } = adapter.limits, most = Math.min(maxBufferSize, maxStorageBufferBindingSize), mebi = (bytes) => Math.ceil(bytes / 2 ** 20);
  const largest = Math.max(...Object.values(tensors).map((one) => (one.words ?? one).byteLength), 4 * shape.kv_heads * shape.context * shape.head_dim);
  if (largest > most) return { reason: `The GPU binds ${mebi(most)} MiB at a time, and the model has arrays of ${mebi(largest)}.` };
  if (shape.head_dim > 256) return { reason: `The GPU's kernels take heads of 256 numbers, and the model's have ${shape.head_dim}.` };
  try {
    const device = await adapter.requestDevice({ requiredLimits: { maxBufferSize, maxStorageBufferBindingSize } });
    const answer = await fetch("decode.wgsl");
    if (!answer.ok) throw new Error("decode.wgsl does not arrive");
    const decoder = new GpuDecoder(device, shape, tensors);
    await decoder.compile(await answer.text());
    return { decoder };
  } catch (error) {
    return { reason: `The GPU cannot be used: ${error.message}.` };
  }
}

class GpuDecoder {
  constructor(device, shape, tensors) {
    Object.assign(this, { device, shape, length: 0, label: "WebGPU", gone: "" });
    const { STORAGE, COPY_SRC, COPY_DST, UNIFORM, MAP_READ } = GPUBufferUsage, { dim, hidden, heads, kv_heads: kvHeads, head_dim: size, layers, context, vocab } = shape;
    const buffer = (bytes, usage) => device.createBuffer({ size: Math.ceil(bytes / 4) * 4, usage }), floats = (count) => buffer(4 * count, STORAGE | COPY_SRC | COPY_DST);
    const filled = (data) => { const made = buffer(data.byteLength, STORAGE | COPY_DST); device.queue.writeBuffer(made, 0, data); return made; };
    device.lost.then(({ message }) => { this.gone = message || "the device is lost"; });
    this.embedding = tensors.embedding;
    this.tensors = {};
    for (const [name, one] of Object.entries(tensors)) if (name !== "embedding" && name !== "cos" && name !== "sin")
      this.tensors[name] = one.words ? { words: filled(one.words), scales: filled(one.scales) } : filled(one);
    this.turns = filled(Float32Array.from({ length: 2 * tensors.cos.length }, (_, i) => (i % 2 ? tensors.sin : tensors.cos)[i >> 1]));
    this.x = floats(ROWS * dim);
    this.q = floats(ROWS * heads * size);
    this.mixed = floats(ROWS * heads * size);
    this.hidden = floats(ROWS * hidden);
    this.logits = floats(vocab);
    this.back = buffer(4 * vocab, MAP_READ | COPY_DST);
    this.cache = Array.from({ length: layers }, () => [floats(kvHeads * context * size), floats(kvHeads * context * size)]);
    // The sizes of each kind of launch, as `struct Sizes` has them.
    const widths = { qkv: [dim, 0], attend: [0, 0], out: [heads * size, dim], gate_up: [dim, hidden], down: [hidden, dim], head: [dim, vocab] };
    this.sizes = new DataView(new ArrayBuffer(SLOT * KINDS.length));
    KINDS.forEach((kind, i) => {
      this.sizes.setFloat32(SLOT * i, shape.norm_eps, true);
      [...widths[kind], heads, kvHeads, size, context].forEach((value, field) => this.sizes.setUint32(SLOT * i + 12 + 4 * field, value, true));
    });
    this.uniforms = buffer(this.sizes.byteLength, UNIFORM | COPY_DST);
  }

  async compile(code) {
    const { device, shape } = this, module = device.createShaderModule({ code }), { heads, kv_heads: kvHeads, head_dim: size, dim, hidden, vocab } = shape;
    const failed = (await module.getCompilationInfo()).messages.find((one) => one.type === "error");
    if (failed) throw new Error(`decode.wgsl, line ${failed.lineNum}: ${failed.message}`);
    const pipeline = (entryPoint, constants) => device.createComputePipelineAsync({ layout: "auto", compute: { module, entryPoint, constants } });
    const [qkv, attend, add, gateUp, head] = await Promise.all([pipeline("qkv", { NORM: 1 }), pipeline("attend", {}), pipeline("project", { ADD: 1 }), pipeline("gate_up", { NORM: 1 }), pipeline("project", { NORM: 1 })]);
    // A launch: its pipeline, its bindings by number, and its groups for a position.
    const launch = (kind, pipeline, arrays, groups) => ({ pipeline, groups: Math.ceil(groups), bindings: device.createBindGroup({ layout: pipeline.getBindGroupLayout(0),
      entries: [{ binding: 0, resource: { buffer: this.uniforms, offset: SLOT * KINDS.indexOf(kind), size: SLOT } }, ...Object.entries(arrays).map(([binding, buffer]) => ({ binding: Number(binding), resource: { buffer } }))] }) });
    const { x, q, mixed, hidden: between, turns, tensors } = this, product = (name, y, x, gain) => ({ 1: y, 2: x, 3: gain, 4: tensors[name].words, 5: tensors[name].scales });
    this.launches = this.cache.flatMap(([keys, values], i) => [
      launch("qkv", qkv, { ...product(`${i}.qkv`, q, x, tensors[`${i}.gain1`]), 6: turns, 7: keys, 8: values }, (heads + 2 * kvHeads) * size / 16),
      launch("attend", attend, { 1: mixed, 7: keys, 8: values, 9: q }, heads),
      launch("out", add, product(`${i}.out`, x, mixed, tensors.final_gain), dim / 16),
      launch("gate_up", gateUp, product(`${i}.gate_up`, between, x, tensors[`${i}.gain2`]), hidden / 8),
      launch("down", add, product(`${i}.down`, x, between, tensors.final_gain), dim / 16),
    ]);
    this.head = launch("head", head, product("head", this.logits, x, tensors.final_gain), vocab / 16);
  }

  rewind(length) { this.length = Math.min(this.length, length); }

  /* As Decoder's. Throws where the device is lost. */
  async append(tokens, wanted = false) {
    for (let i = 0; i < tokens.length; i += ROWS) this.pass(tokens.slice(i, i + ROWS), wanted && i + ROWS >= tokens.length);
    if (!wanted) return null;
    await this.back.mapAsync(GPUMapMode.READ);
    if (this.gone) throw new Error(this.gone);
    const logits = new Float32Array(this.back.getMappedRange().slice(0));
    this.back.unmap();
    return logits;
  }

  pass(tokens, wanted) {
    const { device, shape: { dim }, embedding: { codes, scales } } = this, rows = tokens.length, x = new Float32Array(rows * dim);
    tokens.forEach((id, r) => { for (let i = 0; i < dim; i++) x[r * dim + i] = codes[id * dim + i] * scales[id]; });
    KINDS.forEach((kind, i) => this.sizes.setUint32(SLOT * i + 4, this.length, true));
    this.sizes.setUint32(SLOT * KINDS.indexOf("head") + 8, rows - 1, true);
    device.queue.writeBuffer(this.x, 0, x);
    device.queue.writeBuffer(this.uniforms, 0, this.sizes.buffer);
    const encoder = device.createCommandEncoder(), pass = encoder.beginComputePass();
    const run = ({ pipeline, bindings, groups }, count) => { pass.setPipeline(pipeline); pass.setBindGroup(0, bindings); pass.dispatchWorkgroups(groups, count); };
    for (const one of this.launches) run(one, rows);
    if (wanted) run(this.head, 1);
    pass.end();
    if (wanted) encoder.copyBufferToBuffer(this.logits, 0, this.back, 0, this.logits.size);
    device.queue.submit([encoder.finish()]);
    this.length += rows;
  }
}
