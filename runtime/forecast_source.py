"""Which running forecast a profile gives: the trained predictor's, else the context model's."""

from __future__ import annotations

from daop.core import Geometry

from .context_model import LEADS, ContextModel, turns
from .context_state import ContextState
from .profile import Profile
from .running_forecast import RunningForecast
from .visit_state import VisitState


def running_forecast(geometry: Geometry, profile: Profile | None) -> RunningForecast:
    """The one path for policies and for the simulator's stand-in of a gate. Without a profile nothing but
    frequencies, which are learnt as the run goes on, is known."""
    frequency = None if profile is None else profile.frequency
    if profile is not None and profile.predictor is not None:
        return VisitState(profile.predictor, geometry, frequency)
    arrays = None if profile is None else profile.arrays
    model = ContextModel.from_arrays(arrays or {}, geometry)
    if model is None:
        model = ContextModel.empty(geometry, turns(LEADS, geometry.layers), frequency)
    return ContextState(model, geometry, frequency)
