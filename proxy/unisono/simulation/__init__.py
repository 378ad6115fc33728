"""Simulation of backends, traffic and time with the routing functions of the gateway.

A simulation never sleeps, reads no clock and opens no file. Its result depends only on the plan and its seed, and is
the same on every machine. The model covers everything that determines waiting times: speed of prefill and decoding,
batch size, and contents of the prefix cache.
"""

from unisono.simulation.plan import BackendPlan, Burst, Outage, SimulationPlan, TrafficPlan, parse
from unisono.simulation.results import StrategyResult, to_json, to_table
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
