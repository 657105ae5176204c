"""Models built from tinyforge's ops. `SPECS` registers them, the default first.

Adding a model touches its own folder and this file.
"""

from tinyforge.models.bert import SPEC as BERT
from tinyforge.models.char_mlp import SPEC as CHAR_MLP
from tinyforge.models.gpt2 import SPEC as GPT2
from tinyforge.models.llama import SPEC as LLAMA
from tinyforge.models.lstm import SPEC as LSTM
from tinyforge.models.mamba import SPEC as MAMBA
from tinyforge.models.moe import SPEC as MOE
from tinyforge.models.nanoeuler import SPEC as NANOEULER
from tinyforge.models.vit import SPEC as VIT

SPECS = (NANOEULER, GPT2, LLAMA, MOE, MAMBA, LSTM, CHAR_MLP, BERT, VIT)
