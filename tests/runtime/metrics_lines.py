"""Lines of metrics.jsonl made by hand: the published app's, with every field that it has, and such as ours."""

from __future__ import annotations

import json
from typing import Any

BASE = {
    "kind": "message",
    "timestamp": "2026-11-02T08:15:00Z",
    "deviceModel": "iPhone18,1",
    "osVersion": "Version 26.1 (Build 23B85)",
    "appBuild": "1.3 (41)",
}
MESSAGE = {
    **BASE,
    "modelID": "gemma-4-e2b",
    "hfRevision": "main",
    "computeUnits": "cpuAndNeuralEngine",
    "bundleFolder": "Gemma-4-E2B-it-coreml-speculative",
    "contextLength": 2048,
    "promptTokens": 323,
    "reusedTokens": 310,
    "generatedTokens": 5,
    "finishReason": "eos",
    "modelLoadSeconds": 12.5,
    "ttftSeconds": 1.28,
    "prefillSeconds": 1.27,
    "decodeTokPerSec": 15.3,
    "perTokenMillis": [0.01, 61.5, 64, 0.02, 93.25],
    "perTokenMinMs": 0.01,
    "perTokenMedianMs": 61.5,
    "perTokenMeanMs": 43.756,
    "perTokenMaxMs": 93.25,
    "feedWidths": [4, 8, 32],
    "specEnabled": True,
    "specRounds": 5,
    "specDrafted": 40,
    "specAccepted": 31,
    "specAcceptanceRate": 0.775,
    "specFallbackRounds": 2,
    "footprintAfterPrefillMB": 402.5,
    "footprintAtEndMB": 410.25,
    "peakFootprintMB": 410.25,
    "availableMemoryMB": 2900.0,
    "thermalStateStart": "nominal",
    "thermalStateEnd": "fair",
    "batteryLevel": 0.8,
    "batteryState": "unplugged",
}
"""A generation with the write-up's counts: (26 + 5) of (35 + 5)."""
KV = {
    **{key: MESSAGE[key] for key in (*BASE, "modelID", "computeUnits")},
    "kind": "kv",
    "kvOp": "restore",
    "kvBytes": 6540000,
    "kvDurationSeconds": 0.05,
    "promptTokens": 355,
    "generatedTokens": 48,
    "specRounds": 5,
    "specDrafted": 35,
    "specAccepted": 26,
    "specFallbackRounds": 2,
}
"""A restored checkpoint and its continuation: here the counts leave the pending tokens out."""
SESSION = {**BASE, "kind": "session", "models": ["gemma-4-e2b"]}
ERROR = {
    **{key: MESSAGE[key] for key in (*BASE, "modelID")},
    "kind": "error",
    "errorPhase": "prefill",
    "errorReason": "contextOverflow",
}
LIVE = {**BASE, "kind": "live-cycle", "someNewField": {"nested": [1, 2]}, "ttftSeconds": 0.4}
AGENT = {**BASE, "kind": "agent-tool", "toolName": "clock"}
STEPPED = {
    **MESSAGE,
    "perTokenMillis": [0.1, 90.0, 0.1, 0.1, 0.1, 62.0, 88.0, 0.1],
    "generatedTokens": 8,
    "specRounds": 2,
    "specDrafted": 8,
    "specAccepted": 6,
    "kvferry": {"specStepTokens": [1, 4, 1, 2], "specStepDrafts": [0, 3, 0, 3], "engine": "portable"},
}
"""One of ours: a round that gave 4 tokens, a step of decode, a round that gave 2."""
APPS = [SESSION, MESSAGE, KV, ERROR, LIVE, AGENT]


def line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
