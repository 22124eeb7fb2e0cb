"""Other people's models, and other people's tensors in our layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import takifugu as tk
from takifugu.errors import CheckpointError, LayerError
from takifugu.lowrank.factorized import Factorized

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 60, 8


@dataclass(frozen=True)
class Network:
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    tied: tuple[str, str]
    """The word table, and the decoder that shares its weight."""
    plain: frozenset[str]
    """What its layers are called when they are dense."""


def words(*shape: int) -> Tensor:
    return torch.randint(5, VOCABULARY, shape, generator=torch.Generator().manual_seed(11))


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def bert_batch() -> dict[str, Tensor]:
    mask = torch.ones(4, LENGTH, dtype=torch.long)
    mask[1:, -3:] = 0
    return {"input_ids": words(4, LENGTH), "attention_mask": mask, "labels": words(4, LENGTH)}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def gpt2_batch() -> dict[str, Tensor]:
    ids = words(4, LENGTH)
    return {"input_ids": ids, "labels": ids}


def t5(feed_forward: str = "relu") -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj=feed_forward,
        decoder_start_token_id=0,
        tie_word_embeddings=True,
    )
    return transformers.T5ForConditionalGeneration(config)


def t5_batch() -> dict[str, Tensor]:
    return {"input_ids": words(4, LENGTH), "labels": words(4, LENGTH - 2)}


NETWORKS = [
    Network(
        "bert",
        bert,
        bert_batch,
        ("bert.embeddings.word_embeddings", "cls.predictions.decoder"),
        frozenset({"Linear"}),
    ),
    Network("gpt2", gpt2, gpt2_batch, ("transformer.wte", "lm_head"), frozenset({"Linear", "Conv1D"})),
    Network("t5", t5, t5_batch, ("shared", "lm_head"), frozenset({"Linear"})),
    Network(
        "t5-gated",
        lambda: t5("gated-gelu"),
        t5_batch,
        ("shared", "lm_head"),
        frozenset({"Linear"}),
    ),
]
every_network = pytest.mark.parametrize("network", NETWORKS, ids=[n.name for n in NETWORKS])


def built(network: Network, seed: int = 0) -> nn.Module:
    """With weights large enough to matter: Transformers' own are so small that logits hide mistakes."""
    torch.manual_seed(seed)
    model = network.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits


def named(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name)


# ---- Transformers ------------------------------------------------------------------------------------


@every_network
def test_full_rank_gives_the_same_logits_and_gradients(network: Network) -> None:
    model, batch = built(network), network.batch()
    dense = copy.deepcopy(model)
    report = tk.factorize_(model, rank=1.0, force=True)
    assert len(report.factorized) >= 8
    assert all(layer.error < 1e-5 for layer in report.factorized)
    torch.testing.assert_close(logits(model, batch), logits(dense, batch), rtol=1e-3, atol=1e-4)
    table = network.tied[0]
    for each in (model, dense):
        each(**batch).loss.backward()
    torch.testing.assert_close(
        named(model, table).weight.grad, named(dense, table).weight.grad, rtol=1e-3, atol=1e-4
    )


@every_network
def test_by_default_the_tied_decoder_stays_dense_and_says_why(network: Network) -> None:
    model = built(network)
    table, decoder = network.tied
    report = tk.factorize_(model, rank=0.25)
    assert named(model, decoder).weight is named(model, table).weight
    (left,) = [layer for layer in report.left_dense if layer.name == decoder]
    assert left.reason is not None
    assert left.reason.startswith("the output layer stays dense by default")
    (left,) = [layer for layer in report.left_dense if layer.name == table]
    assert left.reason is not None
    assert left.reason.startswith("an embedding stays dense by default")


@every_network
def test_table_and_decoder_can_go_low_rank_together(network: Network) -> None:
    model, batch = built(network), network.batch()
    table, decoder = network.tied
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    shared = [n for n in tables if named(model, n).weight is named(model, table).weight]
    report = tk.factorize_(model, rank=0.5, where=[*shared, decoder], force=True)
    assert {layer.name: layer.tie for layer in report.factorized}[decoder] == shared[0]
    assert report.params < report.params_before
    u, v = named(model, decoder).factor_parameters()
    for name in shared:
        assert named(model, name).factor_parameters()[0] is u
        assert named(model, name).factor_parameters()[1] is v
    before = logits(model, batch)
    tk.densify_(model)
    assert named(model, decoder).weight is named(model, table).weight
    torch.testing.assert_close(logits(model, batch), before, rtol=1e-3, atol=1e-4)


@every_network
def test_low_rank_it_trains(network: Network) -> None:
    torch.manual_seed(0)
    model, batch = network.build().train(), network.batch()
    tk.factorize_(model, rank=0.25, force=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(8):
        loss = model(**batch).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert without == []
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


@every_network
@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_it_is_the_same_model(network: Network, tied: bool, tmp_path: Path) -> None:
    model, batch = built(network), network.batch()
    tk.factorize_(model, rank=0.25, where=(lambda name, module: True) if tied else None, force=True)
    path = tmp_path / "model.safetensors"
    tk.save(model, path)
    fresh = built(network, seed=1)
    assert not torch.allclose(logits(fresh, batch), logits(model, batch))
    tk.load(path, fresh)
    assert tk.structure_of(fresh) == tk.structure_of(model)
    torch.testing.assert_close(logits(fresh, batch), logits(model, batch), rtol=0, atol=0)
    assert len(list(fresh.parameters())) == len(list(model.parameters()))
    # Low-rank it is on disk too: not the dense size.
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert path.stat().st_size < 1.1 * weights + 32_000


@every_network
def test_densified_it_has_the_plain_classes(network: Network) -> None:
    model, batch = built(network), network.batch()
    classes = [(name, type(module)) for name, module in model.named_modules()]
    keys = list(model.state_dict())
    tk.factorize_(model, rank=0.25, force=True)
    before = logits(model, batch)
    kinds = {type(module).__name__ for module in model.modules()}
    assert not kinds & (network.plain - {"Linear"})  # the factors of a Linear are Linears
    tk.densify_(model)
    assert [(name, type(module)) for name, module in model.named_modules()] == classes
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(logits(model, batch), before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("network", NETWORKS[:3], ids=[n.name for n in NETWORKS[:3]])
def test_a_transformers_model_compiles_as_it_did(network: Network) -> None:
    torch.compiler.reset()
    model, batch = built(network), network.batch()
    targets = batch.pop("labels")  # GPT-2's loss logs a warning, which breaks the graph, dense or not
    if network.name == "t5":
        batch["decoder_input_ids"] = targets
    tk.factorize_(model, rank=0.25, force=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, batch), logits(model, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_t5_reads_a_dtype_and_forms_no_product(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """`T5DenseActDense` looks at `wo.weight.dtype` on every call."""
    network = NETWORKS[-2]
    model, batch = built(network).to(dtype), network.batch()
    tk.factorize_(model, rank=0.25, force=True)
    feed_forward = named(model, "encoder.block.0.layer.1.DenseReluDense")
    assert isinstance(feed_forward.wo, Factorized)
    assert feed_forward.wo.weight.dtype == dtype
    wanted = logits(model, batch)
    monkeypatch.setattr(type(feed_forward.wo), "dense_weights", lambda self: pytest.fail("formed a product"))
    torch.testing.assert_close(logits(model, batch), wanted, rtol=0, atol=0)


def test_t5s_macs_are_those_of_the_factors() -> None:
    network = NETWORKS[-2]
    model, batch = built(network), network.batch()
    del batch["labels"]
    batch["decoder_input_ids"] = words(4, LENGTH)
    report = tk.factorize_(model, rank=0.25, example_input=batch, force=True)
    (wo,) = [layer for layer in report.layers if layer.name == "encoder.block.0.layer.1.DenseReluDense.wo"]
    assert (wo.macs_before, wo.macs) == (4 * LENGTH * 64 * 32, 4 * LENGTH * (64 + 32) * 8)
    assert report.macs_before is not None
    assert report.macs is not None
    saved = sum((layer.macs_before or 0) - (layer.macs or 0) for layer in report.layers)
    assert report.macs_before - report.macs == saved


# ---- torchao -------------------------------------------------------------------------------------------


def digits_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))


def quantize_(model: nn.Module, **options: Any) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), **options)


def test_a_quantized_factorized_model_runs_and_cannot_be_changed(tmp_path: Path) -> None:
    model, x = digits_model(), torch.randn(5, 64)
    tk.factorize_(model, rank=0.5)
    path = tmp_path / "float.safetensors"
    tk.save(model, path)
    structure, wanted = tk.structure_of(model), model(x).detach()
    quantize_(model)
    assert type(model[0].u.weight.data) is not Tensor
    output = model(x).detach()
    assert 0 < (output - wanted).norm() / wanted.norm() < 0.05
    assert model[0].weight.dtype == torch.float32
    assert model[0].weight.shape == (96, 64)

    with pytest.raises(LayerError, match=r"'0' cannot be made dense: its weight is not a plain float tensor"):
        tk.densify_(model)
    with pytest.raises(CheckpointError, match=r"'0\..*quantized or sharded.*save the plain model instead"):
        tk.save(model, tmp_path / "int8.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    with pytest.raises(CheckpointError, match=r"quantized or sharded.*load first, then quantize or shard"):
        tk.load(path, model)
    with pytest.raises(LayerError, match="not a plain float tensor"):
        tk.apply_(model, tk.choose(digits_model(), rank=0.25))
    report = tk.factorize_(model, rank=0.25, rerank=True)
    assert report.factorized == ()
    assert all("quantized?" in (layer.reason or "") for layer in report.left_dense)
    assert tk.structure_of(model) == structure
    torch.testing.assert_close(model(x), output, rtol=0, atol=0)


def test_a_quantized_linear_stays_dense_with_a_reason() -> None:
    model, x = digits_model(), torch.randn(5, 64)
    quantize_(model, filter_fn=lambda module, name: name == "0")
    quantized = model[0]
    report = tk.factorize_(model, rank=0.5, where="*")
    assert [layer.name for layer in report.factorized] == ["2"]
    assert "not a plain float tensor" in (report.left_dense[0].reason or "")
    assert model[0] is quantized
    assert model(x).isfinite().all()


# ---- tensor parallel -----------------------------------------------------------------------------------


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this one process, over a file: no port is opened for others to see."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def test_tensor_parallel_layers_are_refused(mesh: Any, tmp_path: Path) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, x = digits_model(), torch.randn(5, 64)
    factorized = digits_model()
    tk.factorize_(factorized, rank=0.5)
    plain_path = tmp_path / "plain.safetensors"
    tk.save(factorized, plain_path)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    parallelize_module(factorized, mesh, {"0.v": ColwiseParallel(), "0.u": RowwiseParallel()})
    before = list(model.modules()), model(x).detach(), factorized(x).detach()
    refusals: list[Callable[[], object]] = [
        lambda: tk.factorize_(model, rank=0.5),
        lambda: tk.choose(model, rank=0.5),
        lambda: tk.apply_(model, tk.structure_of(factorized)),
        lambda: tk.densify_(factorized),
        lambda: tk.factorize_(factorized, rank=0.25, rerank=True),
    ]
    for refused in refusals:
        with pytest.raises(LayerError, match=r"'0' is a DTensor .*factorize the model before it is sharded"):
            refused()
    with pytest.raises(CheckpointError, match=r"DTensor \(quantized or sharded\); save the plain"):
        tk.save(factorized, tmp_path / "no.safetensors")
    with pytest.raises(CheckpointError, match=r"DTensor in the model \(quantized or sharded\)"):
        tk.load(plain_path, factorized)
    assert list(model.modules()) == before[0]
    torch.testing.assert_close(model(x), before[1], rtol=0, atol=0)
    torch.testing.assert_close(factorized(x), before[2], rtol=0, atol=0)


# ---- models whose path depends on the data ----------------------------------------------------------------

SMALL = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
WIDE = {**SMALL, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**WIDE, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def bart() -> nn.Module:
    sizes = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.BartConfig(**SMALL, **sizes, **tokens, d_model=32)
    return transformers.BartForConditionalGeneration(config)


def deberta() -> nn.Module:
    config = transformers.DebertaConfig(**WIDE, relative_attention=True, pos_att_type=["p2c", "c2p"])
    return transformers.DebertaForMaskedLM(config)


def deberta_v2() -> nn.Module:
    options = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    config = transformers.DebertaV2Config(
        **WIDE, **options, relative_attention=True, pos_att_type=["p2c", "c2p"]
    )
    return transformers.DebertaV2ForMaskedLM(config)


@pytest.mark.parametrize("build", [mixtral, bart, deberta, deberta_v2], ids=lambda build: build.__name__)
def test_macs_are_counted_where_the_shapes_do_not_tell(build: Callable[[], nn.Module]) -> None:
    model = build().train()
    batch = {"input_ids": words(2, LENGTH)}
    values = {name: t.clone() for name, t in model.state_dict().items()}
    report = tk.factorize_(
        model, 4, where=lambda n, m: type(m) is nn.Linear and "lm_head" not in n, example_input=batch
    )
    assert "example_input" not in report.summary()
    assert "MACs" in report.summary()
    assert 0 < report.macs < report.macs_before
    saved = sum(layer.macs_before - layer.macs for layer in report.layers if layer.macs is not None)
    assert report.macs_before - report.macs == saved
    kept = {name: t for name, t in model.state_dict().items() if name in values}
    assert all(torch.equal(t, values[name]) for name, t in kept.items())


def test_the_macs_of_mixtrals_experts_are_counted() -> None:
    model = mixtral()
    tokens, layers, experts_per_token = 2 * LENGTH, 2, 2
    report = tk.factorize_(model, 4, where="*.q_proj", example_input={"input_ids": words(2, LENGTH)})
    experts = tokens * experts_per_token * 3 * 32 * 64
    attention = tokens * (2 * 32 * 32 + 2 * 32 * 16) + 2 * 2 * 4 * LENGTH * LENGTH * 8
    router, head = tokens * 32 * 4, tokens * 32 * VOCABULARY
    assert report.macs_before == layers * (experts + attention + router) + head
