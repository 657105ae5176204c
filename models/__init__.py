"""Models built from tinyforge's ops. `SPECS` registers them, the default first.

Adding a model touches its own folder and this file.
"""

from models.bert import SPEC as BERT
from models.char_mlp import SPEC as CHAR_MLP
from models.gpt2 import SPEC as GPT2
from models.llama import SPEC as LLAMA
from models.lstm import SPEC as LSTM
from models.mamba import SPEC as MAMBA
from models.moe import SPEC as MOE
from models.nanoeuler import SPEC as NANOEULER
from models.vit import SPEC as VIT

SPECS = (NANOEULER, GPT2, LLAMA, MOE, MAMBA, LSTM, CHAR_MLP, BERT, VIT)
