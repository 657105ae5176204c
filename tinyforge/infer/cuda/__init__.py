"""The fused decoders for CUDA GPUs: one launch for many tokens.

plan.py, decode_single_plan.py, decode_batched_plan.py     which block takes which weights, and their order in memory
device.py                               what both decoders share: weights, launches in flight
prompts.py                              prefill, as CUDA graphs
decode_single.py, decode_single.cu                          one row: `RowDecoder`
decode_batched.py, decode_batched.cu                      many rows: `BatchDecoder`
sample_masked.cu                        its draw where grammars allow some tokens only
decode.cuh, sampler.cuh                 what the kernels share: queues of weights, products, attention; the draw
"""
