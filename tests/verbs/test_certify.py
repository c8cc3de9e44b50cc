"""`sipp.certify`: counts, verdicts and words that follow from them, JSON and back, what is refused."""

import copy
import dataclasses
import math
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings, strategies as st
from oracles import binomial as oracle
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sipp import certify, certify_accuracy
from sipp.certificates.evidence import measure_outputs
from sipp.certificates.measures import measure_of, point_ratios
from sipp.errors import DataError, ModelError, OptionError
from sipp.results import hashing
from sipp.results.certificate import AnyCertificate
from sipp.results.jsonio import from_json, to_json


def relative_errors(dense, pruned, holdout):
    """The ratios that a certificate is made of."""
    return measure_outputs(dense, pruned, holdout, measure_of("output"), None, None).fields["ratio"]


def points(n, seed=0, width=6):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def networks(seed=0):
    """A small dense network with BatchNorm and dropout, and a pruned copy."""
    torch.manual_seed(seed)
    dense = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    with torch.no_grad():
        dense[1].running_mean.normal_()
    pruned = copy.deepcopy(dense)
    with torch.no_grad():
        pruned[0].weight[pruned[0].weight.abs() < 0.05] = 0.0
    return dense, pruned


class Stretch(nn.Module):
    """x -> x * factor, but x * bad where the first entry is above a threshold: a known violation pattern."""

    def __init__(self, factor=1.0, bad=None, above=math.inf):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(float(factor)))
        self.bad, self.above = bad, above

    def forward(self, x):
        out = x * self.factor
        return out if self.bad is None else torch.where(x[:, :1] > self.above, x * self.bad, out)


# ---- the numbers


def test_epsilon_and_violations_equal_a_loop_over_points():
    dense, pruned = networks()
    holdout = points(200)
    cert = certify(dense, pruned, holdout, share=0.05, confidence=0.95)
    dense.eval(), pruned.eval()
    with torch.no_grad():
        pairs = list(zip(dense(holdout).double().tolist(), pruned(holdout).double().tolist()))
    ratios = [oracle.ratio(f, g) for f, g in pairs]
    assert cert.epsilon == pytest.approx(oracle.epsilon(ratios, 0.05, 0.05), rel=1e-5)
    assert cert.violations == oracle.k_star(200, 0.05, 0.05) == cert.k_allowed == 4
    assert (cert.n, cert.verdict, cert.fixed, cert.dtype) == (200, "certified", "share", "float32")
    asked = certify(dense, pruned, holdout, epsilon=0.05)
    assert asked.violations == sum(r > 0.05 for r in ratios)
    assert asked.proved_share == pytest.approx(oracle.upper(asked.violations, 200, 0.05), abs=1e-9)
    assert torch.allclose(relative_errors(dense, pruned, holdout), torch.tensor(ratios).double(), rtol=1e-4)


@pytest.mark.parametrize("epsilon", [None, 2.5])
def test_a_certificate_of_no_use_says_so(epsilon):
    """A network that gives zeros is within 100 %: a limit from there on is no news, however sure it is."""
    useless = certify(Stretch(), Stretch(-1.0), points(100), epsilon=epsilon)
    assert useless.verdict == "certified" and useless.epsilon >= 1 and useless.is_useless
    assert useless.sentence.startswith("True but useless: with 95 % confidence")
    assert str(useless).splitlines()[0] == "certified, but useless"
    assert from_json(AnyCertificate, to_json(useless), "it") == useless
    useful = certify(Stretch(), Stretch(0.5), points(100))
    assert useful.sentence.startswith("With 95 % confidence") and str(useful).startswith("certified\n")
    zero = certify(Stretch(), Stretch(0.0), points(100))
    assert zero.epsilon == 1 and zero.is_useless


def test_too_few_points_are_refused_with_the_number_needed():
    dense, pruned = networks()
    cert = certify(dense, pruned, points(200), share=0.01)
    assert cert.verdict == "refused: needs n >= 299"
    assert cert.epsilon == math.inf and "299" in cert.sentence
    assert certify(dense, pruned, points(1)).verdict == "refused: needs n >= 59"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_outputs_that_are_not_finite_are_violations(bad):
    holdout = torch.arange(100.0)[:, None] + 1
    cert = certify(Stretch(), Stretch(1.0, bad, above=90.0), holdout, epsilon=0.5)
    assert cert.violations == 10
    both = Stretch(1.0, bad, above=90.0)  # equal, but not finite in both: nothing can be said of these points
    assert certify(both, both, holdout, epsilon=0.5).violations == 10
    cert = certify(both, both, holdout)
    assert (cert.epsilon, cert.verdict, cert.violations) == (math.inf, "not certified", 10)


def test_a_zero_output_is_fine_only_if_both_are_zero():
    holdout = torch.zeros(100, 3)
    assert certify(Stretch(), Stretch(2.0), holdout, epsilon=0.0).violations == 0

    class Shift(nn.Module):
        def forward(self, x):
            return x + 1e-30

    assert certify(Stretch(), Shift(), holdout, epsilon=1e30).violations == 100


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    data=st.lists(
        st.tuples(*[st.one_of(st.floats(-1e3, 1e3), st.sampled_from([0.0, math.nan, math.inf, 1e-200, 1e200]))] * 4),
        min_size=1,
        max_size=6,
    )
)
def test_point_ratios_equal_the_definition(data):
    values = torch.tensor(data, dtype=torch.float64).reshape(-1, 2, 2)
    f, g = values[:, 0], values[:, 1]
    found = point_ratios(f, g)
    expected = [oracle.ratio(a, b) for a, b in zip(f.tolist(), g.tolist())]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_ratio_is_rounded_up():
    f, g = points(5000, 3).double(), points(5000, 4).double()
    size = (f.abs().amax(1)) * torch.linalg.vector_norm(f / f.abs().amax(1, keepdim=True), dim=1)
    error = (g - f).abs().amax(1) * torch.linalg.vector_norm((g - f) / (g - f).abs().amax(1, keepdim=True), dim=1)
    assert bool((error <= point_ratios(f, g) * size).all())
    assert not bool((error <= (error / size) * size).all())  # plain division breaks its own inequality


def test_outputs_are_subtracted_in_float64():
    class Half(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, x):
            return torch.full((len(x), 1), self.value, dtype=torch.float16)

    ratio = relative_errors(Half(-60000.0), Half(60000.0), points(3))  # the difference overflows in float16
    assert ratio.tolist() == pytest.approx([2.0] * 3, rel=1e-3)
    assert certify(Half(1.0), Half(1.0), points(60)).dtype == "float16"


# ---- state of the models


def test_models_run_in_eval_mode_and_get_their_flags_back():
    dense, pruned = networks()
    dense.train(), pruned.eval()
    dense[1].eval()  # a mixture that train() alone would not restore
    flags = [m.training for net in (dense, pruned) for m in net.modules()]
    before = copy.deepcopy(dense.state_dict())
    cert = certify(dense, pruned, points(100))
    assert [m.training for net in (dense, pruned) for m in net.modules()] == flags
    assert all(torch.equal(before[k], v) for k, v in dense.state_dict().items())
    assert certify(dense, pruned, points(100)) == cert  # no dropout noise


def test_flags_come_back_after_an_exception_and_without_gradients():
    class Broken(nn.Linear):
        def forward(self, x):
            assert not torch.is_grad_enabled() and not self.training
            raise RuntimeError("in forward")

    dense, _ = networks()
    broken = Broken(6, 4)
    with pytest.raises(DataError, match=r"holdout batch 0 .*in forward"):
        certify(dense, broken, points(100))
    assert dense.training and dense[1].training and broken.training
    assert torch.is_grad_enabled()


# ---- forms of data and outputs


class Two(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale

    def forward(self, x, y):
        return {"sum": self.scale * (x + y), "first": x}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: [x],
        lambda x: list(x.split(7)),
        lambda x: iter(x.split(33)),
        lambda x: [(x, torch.zeros(len(x)))],
        lambda x: [({"input": x}, None)],
        lambda x: DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=9),
        lambda x: TensorDataset(x),
        lambda x: [x[:50], x[:0], x[50:]],
        lambda x: x.flip(0),
    ],
)
def test_all_forms_of_data_give_the_same_certificate(wrap):
    dense, pruned = nn.Linear(6, 3, bias=False), nn.Linear(6, 3, bias=False)
    with torch.no_grad():
        dense.weight.copy_(points(3, 7))
        pruned.weight.copy_(dense.weight * (points(3, 8) > 0))
    expected = certify(dense, pruned, points(100))
    found = certify(dense, pruned, wrap(points(100)))
    assert found.epsilon == pytest.approx(expected.epsilon, rel=1e-5)
    assert dataclasses.replace(found, epsilon=expected.epsilon) == expected  # same hashes, same counts


def test_several_inputs_and_selected_outputs():
    x, y = points(100, 1), points(100, 2)
    forms = ([((x, y), None)], [{"x": x, "y": y}], [({"y": y, "x": x}, None)])
    certs = [certify(Two(), Two(1.25), data, output="sum") for data in forms]
    assert all(cert.epsilon == pytest.approx(0.25, rel=1e-6) for cert in certs)
    assert len({cert.data_hash for cert in certs}) == 1
    assert certify(Two(), Two(1.25), forms[0], output="first").epsilon == 0.0
    chosen = certify(Two(), Two(1.25), forms[0], output=lambda out: out["sum"][:, :2])
    assert chosen.epsilon == pytest.approx(0.25, rel=1e-6) and chosen.output.startswith("callable ")
    lstm = nn.LSTM(6, 5, batch_first=True)
    sequences = points(100).reshape(100, 1, 6)
    assert certify(lstm, lstm, sequences, output=0).output == 0


def test_outputs_that_cannot_be_compared_name_the_way_out():
    dense, _ = networks()
    x, y = points(60, 1), points(60, 2)
    with pytest.raises(ModelError, match=r"returns a dict with 'sum', 'first' .*; select one tensor with output="):
        certify(Two(), Two(), [((x, y), None)])
    with pytest.raises(OptionError, match="'other' does not exist"):
        certify(Two(), Two(), [((x, y), None)], output="other")
    with pytest.raises(OptionError, match="does not exist in the model's Tensor"):
        certify(dense, dense, x, output=0)
    with pytest.raises(OptionError, match="must be an index, a key or a function"):
        certify(dense, dense, x, output=True)
    with pytest.raises(ModelError, match=r"outputs have different shapes: dense \(60, 4\), pruned \(60, 5\)"):
        certify(dense, nn.Linear(6, 5), x)
    with pytest.raises(ModelError, match="rows of real numbers"):
        certify(dense, dense, x, output=lambda out: out.argmax(1))
    with pytest.raises(ModelError, match="rows of real numbers"):
        certify(dense, dense, x, output=lambda out: out.mean())
    with pytest.raises(ModelError, match=r"not an nn\.Module"):
        certify(dense, lambda x: x, x)


def test_a_batch_that_cannot_be_read_is_named_and_never_skipped():
    def loader():
        yield points(70)
        raise OSError("corrupt image")

    dense, pruned = networks()
    with pytest.raises(DataError, match=r"holdout batch 1 could not be read.*corrupt image"):
        certify(dense, pruned, loader())


# ---- holdout hygiene


def test_overlap_with_the_calibration_points_is_refused():
    dense, pruned = networks()
    calibration, holdout = points(50, 1), points(100, 2)
    assert certify(dense, pruned, holdout, calibration=calibration).calibration_checked
    assert not certify(dense, pruned, holdout).calibration_checked
    holdout[17], holdout[60] = calibration[3], calibration[40]
    for form in (calibration, [(calibration, None)], [{"input": calibration}]):
        with pytest.raises(
            DataError, match="2 of 100 holdout inputs are also calibration inputs, the first at index 17"
        ):
            certify(dense, pruned, list(holdout.split(9)), calibration=form)
    with pytest.raises(DataError, match="calibration contains no inputs"):
        certify(dense, pruned, holdout, calibration=iter(()))
    with pytest.raises(DataError, match="are also calibration inputs"):
        certify_accuracy(dense, pruned, holdout, calibration=calibration)


# ---- model hashes


def test_the_model_hash_sees_names_values_shapes_and_dtypes_and_no_wrapper():
    net = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=nn.BatchNorm1d(3)))
    base = hashing.of_model(net)
    assert hashing.of_model(copy.deepcopy(net)) == base
    assert hashing.of_model(nn.DataParallel(net)) == base
    reordered = nn.Module()
    reordered.b, reordered.a = net.b, net.a
    assert hashing.of_model(reordered) == base
    others = [copy.deepcopy(net) for _ in range(4)]
    with torch.no_grad():
        others[0].a.weight[0, 0] = math.nextafter(float(others[0].a.weight[0, 0]), 2) + 1e-6
        others[1].b.running_var[1] += 1
    others[2].a.weight.data = others[2].a.weight.data.reshape(2, 3)
    others[3].double()
    renamed = nn.Sequential(OrderedDict(c=net.a, b=net.b))
    assert base not in [hashing.of_model(other) for other in (*others, renamed)]
    assert hashing.of_model(net.bfloat16()) != base


# ---- accuracy


def test_accuracy_counts_equal_a_loop_over_points():
    dense, pruned = networks()
    x = points(300)
    y = torch.randint(0, 4, (300,), generator=torch.Generator().manual_seed(1))
    cert = certify_accuracy(dense, pruned, list(zip(x.split(70), y.split(70))))
    dense.eval(), pruned.eval()
    f, g = dense(x).argmax(1).tolist(), pruned(x).argmax(1).tolist()
    b = sum(a == t and p != t for a, p, t in zip(f, g, y.tolist()))
    c = sum(a != t and p == t for a, p, t in zip(f, g, y.tolist()))
    differ = sum(a != p for a, p in zip(f, g))
    assert min(b, c) > 0
    assert (cert.mode, cert.n_lost, cert.n_gained, cert.n_differ, cert.n) == ("labels", b, c, differ, 300)
    expected = oracle.upper(b, 300, 0.025) - oracle.lower(c, 300, 0.025)
    assert cert.drop_upper == pytest.approx(expected, abs=1e-9)
    assert "300 labelled inputs" in cert.sentence
    free = certify_accuracy(dense, pruned, x)
    assert (free.mode, free.n_differ, free.n_lost) == ("label-free", differ, 0)
    assert free.drop_upper == pytest.approx(oracle.upper(differ, 300, 0.05), abs=1e-9)


class Table(nn.Module):
    """Rows of a table by the index in the input."""

    def __init__(self, rows):
        super().__init__()
        self.register_buffer("rows", torch.tensor(rows))

    def forward(self, x):
        return self.rows[x[:, 0].long()]


def test_outputs_that_are_not_finite_can_only_raise_the_drop():
    right, wrong, nan, inf = [0.0, 1.0], [1.0, 0.0], [math.nan, 1.0], [0.0, math.inf]
    x, y = torch.arange(7.0)[:, None], torch.ones(7, dtype=torch.long)
    dense = Table([right, nan, nan, nan, wrong, right, wrong])
    pruned = Table([nan, nan, right, wrong, right, inf, inf])
    cert = certify_accuracy(dense, pruned, [(x, y)])
    assert (cert.n_lost, cert.n_gained, cert.n_differ) == (4, 1, 7)


def test_labels_that_cannot_be_used_are_refused():
    dense, pruned = networks()
    x, y = points(10), torch.zeros(10, dtype=torch.long)
    for bad in (y + 0.5, y[:5], y[:, None].expand(10, 4)):
        with pytest.raises(DataError, match="labels are"):
            certify_accuracy(dense, pruned, [(x, bad)])
    for value in (-1, 4):
        with pytest.raises(DataError, match=r"outside 0 \.\. 3"):
            certify_accuracy(dense, pruned, [(x, y + value)])
    with pytest.raises(DataError, match="only 10 of 20 inputs have labels"):
        certify_accuracy(dense, pruned, [(x, y), points(10, 3)])
    with pytest.raises(ModelError, match="needs n x classes"):
        certify_accuracy(nn.Linear(6, 1), nn.Linear(6, 1), x)
