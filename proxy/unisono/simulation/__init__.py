"""A model of backends, traffic and time, in which the functions that choose for the gateway choose for a plan.

Nothing here waits, asks a clock or opens a file: a run is a function of its plan and its seed, and it is the same on
every machine. What is modelled is what decides about waiting: how fast a backend reads a prompt and writes an answer,
how many answers at once, and what it still holds of the prompts before.
"""

from unisono.simulation.plan import BackendPlan, Burst, Outage, SimulationPlan, TrafficPlan, parse
from unisono.simulation.report import to_json, to_table
from unisono.simulation.results import StrategyResult
from unisono.simulation.run import simulate

__all__ = [
    "BackendPlan",
    "Burst",
    "Outage",
    "SimulationPlan",
    "StrategyResult",
    "TrafficPlan",
    "parse",
    "simulate",
    "to_json",
    "to_table",
]
