"""The compiled decoder against the op-by-op one with the same rounding, and bit for bit against itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine import native
from engine.backends.base import Embedding, Linear
from engine.backends.cpu import CpuBackend
from engine.loader import open_checkpoint
from engine.models import build
from engine.native.compile import build as compile_decoder
from engine.native.packing import Packed, interleave_halves, pack
from engine.native.runner import NativeRunner, open_runner
from engine.runner import ModelRunner, load
from tests.engine.flat import Paged, all_logits, flat_batch, relative_error

pytestmark = pytest.mark.skipif(not native.able(), reason="this CPU has no AVX512-VNNI")

SIZES = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
GEMMA3 = {"head_dim": 40, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"head_dim": 16}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2-untied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 64}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**GEMMA3, "final_logit_softcapping": 5.0}),
    "gemma3-capped": (Gemma3ForCausalLM, Gemma3TextConfig, {**GEMMA3, "attn_logit_softcapping": 2.0}),
    "many-heads": (LlamaForCausalLM, LlamaConfig, {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 8}),
}


class Rounded(CpuBackend):
    """float32 op by op, but weights, activations and the KV cache hold only what the compiled decoder can store."""

    def __init__(self, bits: int, kv_int8: bool) -> None:
        super().__init__("float32")
        self.bits, self.kv_int8 = bits, kv_int8

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._product(weight, bias, self.bits)

    def head(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._product(weight, bias, 8)

    def embedding(self, table: Tensor, head: Linear | None) -> Embedding:
        return super().embedding(pack(table, None, 8).dequantised()[: len(table), : table.shape[1]], None)

    def rotate_and_store(self, mixed: Tensor, heads: int, norms, rotations: Tensor, pool: Tensor, plan) -> None:
        super().rotate_and_store(mixed, heads, norms, rotations, pool, plan)
        keys, values = pool[plan.slot_mapping].chunk(2, dim=1)
        pool[plan.slot_mapping] = torch.cat([self._kept_spread(keys), self._kept(values)], 1)
        mixed[:, :heads] = self._kept_spread(mixed[:, :heads])

    def _kept_spread(self, heads: Tensor) -> Tensor:
        if not self.kv_int8:
            return self._kept(heads)
        size = heads.shape[-1] & -heads.shape[-1]
        turn = torch.ones(1, 1)
        while len(turn) < size:
            turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)]) / 2**0.5
        parts = heads.unflatten(-1, (-1, size))
        return (self._kept((parts @ turn).flatten(-2)).unflatten(-1, (-1, size)) @ turn).flatten(-2)

    def _kept(self, heads: Tensor) -> Tensor:
        if not self.kv_int8:
            return heads.bfloat16().float()
        step = heads.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return (heads / step).round() * step

    @staticmethod
    def _product(weight: Tensor, bias: Tensor | None, bits: int) -> Linear:
        packed = pack(weight, bias, bits)
        stored = packed.dequantised()

        def multiply(x: Tensor) -> Tensor:
            x = torch.nn.functional.pad(x, (0, packed.columns - x.shape[1]))
            groups = x.split(128, dim=1)
            steps = [group.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127 for group in groups]
            rounded = [(group / step).round() * step for group, step in zip(groups, steps, strict=True)]
            out = torch.cat(rounded, 1) @ stored.T
            return (out if packed.bias is None else out + packed.bias)[:, : len(weight)]

        return multiply


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    kind, config, more = FAMILIES[request.param]
    made = kind(config(**{**SIZES, **more}))
    for name, parameter in made.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += torch.randn_like(parameter) / 4
    path: Path = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def cached(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    native.library()  # compiled into the user's own cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def compiled(folder: Path, bits: int, *, kv_int8: bool = False, blocks: int = 64) -> NativeRunner:
    library = native.library()
    assert library is not None, "tests need a C++ compiler"
    runner = open_runner(folder, bits, library, kv_int8=kv_int8)
    runner.allocate(blocks)
    return runner


TOKENS = torch.randint(3, 300, (290,), generator=torch.Generator().manual_seed(1)).tolist()
BLOCKS = [*range(40, 20, -1)]


@pytest.mark.parametrize(("bits", "kv_int8"), [(8, False), (4, False), (8, True)])
def test_logits_are_those_of_the_same_rounding_op_by_op(folder: Path, bits: int, kv_int8: bool) -> None:
    with torch.inference_mode():
        backend = Rounded(bits, kv_int8)
        reference = ModelRunner(build(open_checkpoint(folder), backend), backend)
        reference.allocate(64)
        wanted = all_logits(reference, TOKENS, BLOCKS)
        got = all_logits(compiled(folder, bits, kv_int8=kv_int8), TOKENS, BLOCKS)
    # What is left is attention weights in bfloat16, or in 8 bits, and a rounding here and there that falls to the other
    # side.
    assert relative_error(got, wanted) < (0.06 if kv_int8 else 0.03)
    assert (got.argmax(-1) == wanted.argmax(-1)).float().mean() > (0.9 if kv_int8 else 0.93)
    assert ((got - wanted).norm() / wanted.norm()).item() < (0.04 if kv_int8 else 0.02)


@pytest.mark.parametrize("kv_int8", [False, True])
def test_neighbours_and_chunks_change_no_bit(folder: Path, kv_int8: bool) -> None:
    runner = compiled(folder, 8, kv_int8=kv_int8, blocks=400)
    whole = all_logits(runner, TOKENS, BLOCKS)
    for chunk in (1, 7, 64, 200):
        assert torch.equal(all_logits(runner, TOKENS, BLOCKS, chunk=chunk), whole)
    neighbours = [(Paged(TOKENS[i:], [*range(50 + 20 * i, 70 + 20 * i)], 5 * i), 1 + i % 4) for i in range(17)]
    runner.forward(flat_batch(neighbours))
    for sequence, _ in neighbours:
        sequence.done -= 1
    lonely = Paged(TOKENS, BLOCKS, len(TOKENS) - 1)
    steps = [(sequence, 1) for sequence, _ in neighbours]
    together = runner.forward(flat_batch([*steps[:9], (lonely, 1), *steps[9:]]))
    assert torch.equal(together[9], whole[-1])


def test_hidden_states_are_what_the_head_multiplies(folder: Path) -> None:
    runner, reference = compiled(folder, 8), load(folder, "float32")
    reference.allocate(64)
    sequence = Paged(TOKENS[:50], BLOCKS)
    wanted = reference.hidden(flat_batch([(Paged(TOKENS[:50], BLOCKS), 50)]))
    got = runner.hidden(flat_batch([(sequence, 50)]))
    assert got.shape == wanted.shape
    assert torch.nn.functional.cosine_similarity(got, wanted).min() > 0.98


@pytest.mark.parametrize("bits", [8, 4])
def test_packing_keeps_values_to_half_a_step(bits: int) -> None:
    weight = torch.randn(96, 160)
    weight[3], weight[4] = 0, 0.5
    packed = pack(weight, torch.randn(96), bits)
    error = (packed.dequantised()[:96, :160] - weight).abs()
    if bits == 8:
        assert (error <= packed.scales[:, None] * 0.501).all()
    else:
        steps = packed.scales.permute(2, 0, 3, 1).reshape(2, packed.rows, -1)[0, :96, :5].float()
        assert (error.view(96, 5, 32) <= steps[:, :, None] * 0.501 + 2e-3).all()
        spread = weight.view(96, 5, 32).amax(-1) - weight.view(96, 5, 32).amin(-1)
        assert (steps <= spread / 7 + 1e-3).all()
    halves = interleave_halves(packed).dequantised()
    plain = packed.dequantised()
    turns = torch.stack([plain[:48].view(3, 16, -1), plain[48:].view(3, 16, -1)], 1).view(plain.shape)
    assert torch.equal(halves, turns)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_weight_of_one_tile_is_read_back(bits: int) -> None:
    weight = torch.randn(32, 64)
    assert relative_error(pack(weight, None, bits).dequantised(), weight) < 0.1


def test_weights_in_sixteen_steps_or_fewer_are_kept_as_they_are() -> None:
    steps, least = torch.rand(64, 4, 1).half().float() / 8 + 2**-6, torch.randn(64, 4, 1).half().float()
    used = torch.randint(7, 16, (64, 4, 1))
    values = (torch.rand(64, 4, 32) * (used + 1)).floor()
    values[:, :, 0], values[:, :, 1] = 0, used[:, :, 0].float()
    weight = (values * steps + least).view(64, 128)
    torch.testing.assert_close(pack(weight, None, 4).dequantised(), weight, rtol=0, atol=2e-3)


def test_a_second_start_reads_what_the_first_packed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = all_logits(compiled(folder, 4), TOKENS[:20], BLOCKS)
    with monkeypatch.context() as patch:
        patch.setattr("engine.native.runner.open_checkpoint", _fail)
        again = all_logits(compiled(folder, 4), TOKENS[:20], BLOCKS)
    assert torch.equal(first, again)


def _fail(path: Path) -> None:
    raise AssertionError("the checkpoint was opened")


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(p.read_bytes()[:-999]), lambda p: p.write_bytes(b"no")])
def test_a_damaged_cache_is_made_again(folder: Path, damage: Callable[[Path], None], tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = all_logits(compiled(folder, 8), TOKENS[:20], BLOCKS)
    (kept,) = (tmp_path / "farthing" / "packed").glob("*.pt")
    damage(kept)
    assert torch.equal(all_logits(compiled(folder, 8), TOKENS[:20], BLOCKS), first)
    assert torch.load(kept, weights_only=False)


def test_a_changed_model_is_packed_anew(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled(folder, 8)
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    compiled(folder, 8)
    assert len([*(tmp_path / "farthing" / "packed").glob("*.pt")]) == 1


def test_without_a_compiler_int8_runs_op_by_op_and_int4_says_why(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("engine.runner.library", lambda: None)
    assert isinstance(load(folder, "int8"), ModelRunner)
    for refused in ({"dtype": "int4"}, {"dtype": "int8", "kv": "int8"}):
        with pytest.raises(ValueError, match=r"no compiled decoder: .* g\+\+"):
            load(folder, **refused)
    with pytest.raises(ValueError, match="leave it out with bfloat16"):
        load(folder, "bfloat16", kv="int8")


def test_the_compiler_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"install g\+\+, or name one in CXX"):
        compile_decoder(tmp_path, bf16=False)


def test_sizes_that_do_not_fit_the_decoder_run_op_by_op(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    LlamaForCausalLM(LlamaConfig(**{**SIZES, "intermediate_size": 40})).save_pretrained(tmp_path)
    assert isinstance(load(tmp_path, "int8"), ModelRunner)
    assert "feed-forward size is not a multiple of 16" in caplog.text


def test_packed_weights_do_not_multiply_by_themselves() -> None:
    packed = pack(torch.randn(32, 64), None, 8)
    assert isinstance(packed, Packed)
    with pytest.raises(TypeError, match="compiled decoder"):
        packed(torch.randn(1, 64))
