"""What every registered predictor promises; a new file in predictors/ is covered without an edit here."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from routing_samples import sample_routing

from daop.core import DaopError, Geometry
from daop.predictors.artefact import load, save, seal
from daop.predictors.base import PREDICTORS, NextLayer, Predictor, Reuse, names_of
from daop.predictors.data import Routing
from daop.predictors.history import contexts, hidden_contexts, walk
from daop.predictors.session import Session
from daop.training.reuse_replay import score_waits

GEOMETRIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "uneven": {"experts": (4, 9, 6, 5), "top_k": 3},
    "k_is_1": {"experts": (5, 5, 5), "top_k": 1},
    "k_is_all": {"experts": (3, 3, 3), "top_k": 3, "kinds": 3},
    "one_sequence": {"lengths": (60,)},
}
_FITTED: dict[tuple[str, str], Predictor] = {}


def fitted(name: str, shape: str = "plain") -> tuple[Predictor, Routing]:
    data = sample_routing(**GEOMETRIES[shape])
    if (name, shape) not in _FITTED:
        predictor = PREDICTORS.get(name)()
        assert predictor.fit(data) is predictor
        _FITTED[name, shape] = predictor
    return _FITTED[name, shape], data


def outputs(predictor: Predictor, data: Routing) -> list[NDArray[Any]]:
    """Everything it forecasts on ``data``, offline: next layers as [N, E] per (layer, horizon), or waits."""
    if isinstance(predictor, Reuse):
        return [score_waits(predictor, data, chunk=16)]
    assert isinstance(predictor, NextLayer)
    layers = data.geometry.layers
    parts: dict[tuple[int, int], list[NDArray[Any]]] = {}
    walked = hidden_contexts(data, 16) if predictor.needs.hidden else contexts(data, 16)
    for _, context in walked:
        for layer in range(layers):
            context.layer = layer
            for horizon in range(1, min(predictor.horizons, layers - 1 - layer) + 1):
                parts.setdefault((layer, horizon), []).append(predictor.probabilities(context, horizon))
    return [np.concatenate(parts[key]) for key in sorted(parts)]


@pytest.mark.parametrize("shape", GEOMETRIES)
@pytest.mark.parametrize("name", PREDICTORS.names())
def test_forecasts_have_the_promised_form(name: str, shape: str) -> None:
    predictor, data = fitted(name, shape)
    keys = [
        (layer, h)
        for layer in range(data.geometry.layers)
        for h in range(1, min(getattr(predictor, "horizons", 0), data.geometry.layers - 1 - layer) + 1)
    ]
    got = outputs(predictor, data)
    if isinstance(predictor, Reuse):
        assert got[0].shape == (len(data), data.geometry.total)
        assert (got[0] >= 1.0).all()
        assert np.isfinite(got[0]).all()
        return
    assert len(got) == len(keys)
    for (layer, horizon), scores in zip(keys, got, strict=True):
        assert scores.shape == (len(data), data.geometry.experts[layer + horizon])
        assert scores.dtype == np.float32
        assert ((scores >= 0) & (scores <= 1)).all()


@pytest.mark.parametrize("name", PREDICTORS.names())
def test_save_and_load_change_nothing(name: str, tmp_path: Path) -> None:
    predictor, data = fitted(name)
    save(predictor, tmp_path / "p")
    save(predictor, tmp_path / "p")  # over itself
    again = load(tmp_path / "p")
    assert type(again) is type(predictor)
    assert again.parameters() == predictor.parameters()
    assert again.geometry_ == predictor.geometry_
    for a, b in zip(outputs(predictor, data), outputs(again, data), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {p.suffix for p in (tmp_path / "p").iterdir()} <= {".json", ".safetensors", ".txt"}
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("name", PREDICTORS.names())
def test_online_equals_offline(name: str) -> None:
    predictor, data = fitted(name)
    g = data.geometry
    offline = outputs(predictor, data)
    keys = sorted((layer, h) for layer in range(g.layers) for h in range(1, g.layers - layer) if h <= 4)
    session = Session(
        g,
        predictor if isinstance(predictor, NextLayer) else None,
        predictor if isinstance(predictor, Reuse) else None,
    )
    starts = set(data.offsets[:-1].tolist())
    assert data.weights is not None
    assert data.token_ids is not None
    assert data.hidden is not None
    for i in range(len(data)):
        if i in starts:
            session.begin()
        for layer in range(g.layers):
            ids = data.flat[i : i + 1, layer] - g.offsets[layer]
            session.observe(
                layer,
                ids,
                data.weights[i : i + 1, layer],
                token_ids=data.token_ids[i : i + 1],
                hidden=data.hidden.values[i : i + 1, layer].astype(np.float32),
            )
            for horizon in range(1, 5):
                got = session.forecast(horizon)
                if isinstance(predictor, NextLayer) and layer + horizon < g.layers:
                    assert got is not None
                    expected = offline[keys.index((layer, horizon))][i]
                    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)
                else:
                    assert got is None
        if isinstance(predictor, Reuse):
            waits = session.wait()
            assert waits is not None
            np.testing.assert_allclose(waits, offline[0][i], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", PREDICTORS.names())
def test_fitting_is_repeatable(name: str) -> None:
    predictor, data = fitted(name)
    again = type(predictor)().fit(data)
    for a, b in zip(outputs(predictor, data), outputs(again, data), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PREDICTORS.names())
def test_the_constructor_only_stores(name: str) -> None:
    cls = PREDICTORS.get(name)
    predictor = cls()
    for parameter in inspect.signature(cls).parameters.values():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert getattr(predictor, parameter.name) == parameter.default
    assert not [a for a in vars(predictor) if a.endswith("_")]


@pytest.mark.parametrize("name", names_of("reuse"))
def test_a_layers_waits_do_not_look_at_later_layers(name: str) -> None:
    predictor, data = fitted(name)
    assert isinstance(predictor, Reuse)
    g = data.geometry
    row = 20
    shuffled = data.flat.copy()
    shuffled[row, 2:] = np.array([[g.offsets[2], g.offsets[2] + 1], [g.offsets[3], g.offsets[3] + 1]])
    other = Routing(geometry=g, flat=shuffled, offsets=data.offsets, weights=data.weights)
    a, b = score_waits(predictor, data)[row], score_waits(predictor, other)[row]
    np.testing.assert_allclose(a[: g.offsets[2]], b[: g.offsets[2]], rtol=1e-5)


@pytest.mark.parametrize("name", PREDICTORS.names())
def test_a_tampered_artefact_is_refused(name: str, tmp_path: Path) -> None:
    predictor, _ = fitted(name)
    save(predictor, tmp_path / "p")
    document = json.loads((tmp_path / "p" / "predictor.json").read_text())
    for file in document["files"]:
        path = tmp_path / "p" / file
        whole = path.read_bytes()
        path.write_bytes(whole[:-3] + b"xyz")
        with pytest.raises(DaopError, match="was changed"):
            load(tmp_path / "p")
        path.unlink()
        with pytest.raises(DaopError, match="missing"):
            load(tmp_path / "p")
        path.write_bytes(whole)
    for key, value in (("geometry", {"experts": [3]}), ("parameters", {"nonsense": 1}), ("version", 9)):
        changed = {**document, key: value}
        for written in (changed, seal(changed)):
            (tmp_path / "p" / "predictor.json").write_text(json.dumps(written))
            with pytest.raises(DaopError):
                load(tmp_path / "p")


@pytest.mark.parametrize("name", PREDICTORS.names())
def test_another_models_geometry_is_named(name: str) -> None:
    predictor, _ = fitted(name)
    other = Geometry.uniform(4, 16, 2)
    kwargs: dict[str, Any] = {"reuse" if isinstance(predictor, Reuse) else "next_layer": predictor}
    with pytest.raises(DaopError, match=r"8 experts per layer.*16"):
        Session(other, **kwargs)


@pytest.mark.parametrize("name", PREDICTORS.names())
def test_nothing_to_fit_on_is_an_error(name: str) -> None:
    data = sample_routing()
    with pytest.raises(DaopError):
        PREDICTORS.get(name)().fit(data.select(np.array([], dtype=np.int64)))


def test_foreign_code_is_only_imported_when_allowed(tmp_path: Path) -> None:
    predictor, _ = fitted("popularity")
    save(predictor, tmp_path / "p")
    path = tmp_path / "p" / "predictor.json"
    document = json.loads(path.read_text())
    document["predictor"] = "daop.predictors.popularity:Popularity"
    path.write_text(json.dumps(seal(document)))
    with pytest.raises(DaopError, match="code outside daop"):
        load(tmp_path / "p")
    assert load(tmp_path / "p", allow="daop.predictors.popularity:Popularity")


def test_walk_gives_the_same_pasts_in_any_chunks() -> None:
    data = sample_routing()
    whole = [(b, a) for _, b, a in walk(data, 1000)]
    parts = [(b, a) for _, b, a in walk(data, 7)]
    for which in (0, 1):
        for name in ("previous", "frequency", "since", "weight", "length"):
            x = np.concatenate([getattr(p[which], name) for p in whole])
            y = np.concatenate([getattr(p[which], name) for p in parts])
            np.testing.assert_array_equal(x, y)
