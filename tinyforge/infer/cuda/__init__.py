"""The fused decoders for CUDA GPUs: one launch for many tokens.

plan.py, row_plan.py, batch_plan.py     which block takes which weights, and their order in memory
device.py                               what both decoders share: weights, launches in flight
prompts.py                              prefill, as CUDA graphs
row.py, row.cu                          one row: `RowDecoder`
batch.py, batch.cu                      many rows: `BatchDecoder`
decode.cuh, sampler.cuh                 what both kernels share: queues of weights, products, attention; the draw
"""
