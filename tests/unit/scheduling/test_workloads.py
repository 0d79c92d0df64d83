"""The workloads' numbers can be derived, agree with independent counts, and make runs that end."""

from __future__ import annotations

import json

import pytest

from digenrl.scheduling import Colocated
from digenrl.scheduling.bound import Pool, work_bound
from digenrl.scheduling.predict import predict
from digenrl.scheduling.roofline import Architecture, forward_flops
from digenrl.scheduling.workloads import Workload, load, main, workload

ALL = load()
each = pytest.mark.parametrize("found", ALL.values(), ids=list(ALL))


def test_there_are_the_six_shapes():
    shapes = ["hunyuanvideo-13b", "wan2.1-14b", "flux.1-12b", "qwen-image-20b", "sd3.5-medium", "wan2.1-1.3b"]
    assert list(ALL) == shapes


@each
def test_the_formula_agrees_with_the_flops_torch_counts(found: Workload):
    assert forward_flops(found.model, found.geometry.tokens) == pytest.approx(found.model.counted_flops, rel=0.005)


@each
def test_the_architecture_accounts_for_the_parameters(found: Workload):
    model = found.model
    d, stream = model.hidden, 4 * model.hidden**2 + 2 * model.hidden * model.ffn
    modulation = 6 * d**2
    blocks = model.double_blocks * 2 * (stream + modulation) + model.single_blocks * (stream + modulation / 2)
    blocks += model.cross_blocks * (stream + 4 * d**2) + model.self_attentions * 4 * d**2
    assert blocks == pytest.approx(model.parameters, rel=0.05)


def test_one_forward_by_hand():
    # 3 latent and 2 text tokens, d = 2, f = 8: one stream has 4*4 + 2*2*8 = 48 parameters.
    double = Architecture(2, 8, 1, 0, 0, 2, 0, 0.0, "")
    assert forward_flops(double, 3) == 2 * 5 * 48 + 4 * 2 * 5**2
    cross = Architecture(2, 8, 0, 0, 1, 2, 0, 0.0, "")
    assert forward_flops(cross, 3) == 2 * (3 * (48 + 8) + 2 * 8) + 4 * 2 * (3 * 3 + 3 * 2)


def test_the_achieved_share_follows_from_the_published_latency():
    device = ALL["hunyuanvideo-13b"].device
    # 33 latent frames of 45 x 80 patches and 256 text tokens; 720 d^2 parameters per token in 60 blocks.
    tokens, d = 33 * 45 * 80 + 256, 3072
    flops = 50 * (2 * 720 * d**2 * tokens + 4 * d * 60 * tokens**2)
    assert device.mfu == pytest.approx(flops / 1904.08 / 9.89e14)
    assert 0.3 < device.mfu < 0.35


@each
def test_every_number_has_a_source(found: Workload):
    for part in (found.model, found.geometry, found.run, found.training, found.reward):
        assert len(part.source) > 20
    assert all(source for _, source in found.device_sources)


@each
def test_costs_scale_with_the_rate_but_links_do_not(found: Workload):
    costs = found.cost_model(found.shape(1), gap_s=0.01)
    reference, slow = costs.of_kind("rate-1.0"), costs.of_kind("rate-0.35")
    assert slow.rollout_step_s == pytest.approx(reference.rollout_step_s / 0.35)
    assert slow.train_s[1] == pytest.approx(reference.train_s[1] / 0.35)
    assert slow.decode_s == pytest.approx(reference.decode_s / 0.35)
    assert (slow.switch_s, slow.install_s, slow.gap_s) == (reference.switch_s, reference.install_s, 0.01)


@each
def test_a_run_of_it_ends_and_stays_under_the_bound(found: Workload):
    costs = found.cost_model(found.shape(4))
    pools = [Pool("rate-1.0", 4), Pool("rate-0.6", 2)]
    predicted = predict(costs, pools, Colocated(), std_scope=found.run.std_scope, iterations=3)
    assert work_bound(costs, pools).seconds <= predicted.iteration_s < 2 * work_bound(costs, pools).seconds


def test_only_full_training_gathers():
    gathers = {name: w.cost_model(w.shape(1)).of_kind("rate-1.0").gather_s for name, w in ALL.items()}
    assert gathers.pop("hunyuanvideo-13b") == pytest.approx(3 * 2 * 12821012544 * 7 / 8 / 4.5e11)
    assert set(gathers.values()) == {0.0}


@each
def test_the_timestep_batch_is_what_fits(found: Workload):
    derived = found.derivation()
    batch = found.timestep_batch
    needed = derived["states"] + batch * found.run.micro_batch * derived["activations"]
    assert needed <= 0.9 * found.device.memory_bytes
    assert found.shape(1).timestep_batch == batch
    assert max(found.cost_model(found.shape(1)).timestep_batches) == batch
    with pytest.raises(ValueError, match=f"timestep_batch={batch + 1} of {found.name} must be 1 to {batch}"):
        found.shape(1, batch + 1)


@each
def test_the_shape_is_that_of_the_file(found: Workload):
    shape = found.shape(3)
    assert (shape.groups, shape.group_size, shape.updates) == (
        found.run.groups,
        found.run.group_size,
        found.run.updates,
    )
    assert len(shape.trained_steps(2)) == found.run.trained_steps
    assert shape.groups % shape.updates == 0 and shape.group_size % shape.micro_batch == 0


def test_the_model_survives_json():
    costs = ALL["flux.1-12b"].cost_model(ALL["flux.1-12b"].shape(1))
    assert json.loads(json.dumps(costs.to_json()))["kinds"].keys() == {"rate-1.0", "rate-0.6", "rate-0.35"}


def test_explain_prints_every_quantity_and_source(capsys: pytest.CaptureFixture[str]):
    assert main(["--explain", "qwen-image-20b", "--kind", "rate-0.6"]) == 0
    printed = capsys.readouterr().out
    for quantity in ALL["qwen-image-20b"].derivation("rate-0.6"):
        assert str(quantity) in printed
    assert "performance.md" in printed and "P=32 groups x G=16 samples" in printed


def test_names_are_listed(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert capsys.readouterr().out.split() == list(ALL)


def test_unknown_names_are_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match=r"workload 'flux-12b' is not known; did you mean flux\.1-12b\?"):
        workload("flux-12b")
    assert main(["--explain", "wan2.1-14"]) == 2
    assert main(["--explain", "wan2.1-14b", "--kind", "a100"]) == 2
    assert "kind 'a100' is not known; there are rate-1.0, rate-0.6, rate-0.35" in capsys.readouterr().err
