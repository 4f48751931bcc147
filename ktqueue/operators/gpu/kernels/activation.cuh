// How rows of gate and up are joined: the twin of activation.py.
#pragma once

enum Activation { NONE, silu, gelu, gelu_tanh, swiglu_clamped, silu_limited };

constexpr Activation activation = ACTIVATION;  // NONE: one matrix, otherwise gate and up

// is_rough: to a few units in the last place of float32, which a rounding to bfloat16 hides.
template <bool is_rough>
__device__ inline float sigmoid(float x) {
  return is_rough ? __fdividef(1.0f, 1.0f + __expf(-x)) : 1.0f / (1.0f + __expf(-x));
}

template <bool is_rough = false>
__device__ inline float join(float gate, float up) {
  if constexpr (activation == swiglu_clamped) {  // comparisons, so that NaN stays NaN
    gate = gate > LIMIT ? LIMIT : gate;
    up = up > LIMIT ? LIMIT : up;
    up = up < -LIMIT ? -LIMIT : up;
    return gate * sigmoid<is_rough>(ALPHA * gate) * (up + 1.0f);
  } else if constexpr (activation == silu_limited) {
    gate = gate * sigmoid<is_rough>(gate);
    gate = gate > LIMIT ? LIMIT : gate;
    up = up > LIMIT ? LIMIT : up;
    return gate * (up < -LIMIT ? -LIMIT : up);
  } else if constexpr (activation == gelu) {
    return 0.5f * gate * (1.0f + erff(gate * 0.7071067811865476f)) * up;
  } else if constexpr (activation == gelu_tanh) {
    return gate * sigmoid<is_rough>(2.0f * (0.7978845608028654f * (gate + 0.044715f * gate * gate * gate))) * up;
  } else {
    return gate * sigmoid<is_rough>(gate) * up;
  }
}
