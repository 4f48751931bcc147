// Finds scales, minimums and codes with the least weighted squared error.
//
// A sub-block is 16 or 32 values that share a scale, and in some formats a minimum. Its search tries many scales. For
// each it rounds the values to codes, and computes the best scale for these codes, in closed form. The best of all
// is improved by rounding with it once more, as in Lloyd's algorithm.
//
// A superblock stores the scales and minimums of its sub-blocks as whole numbers of a unit, d and m. Each sub-block
// chooses the numbers next to its wish with the least error. Then d and m are fitted to all 256 values in closed form,
// and the choice is repeated. All errors are those of the halves and whole numbers that are stored.
//
// Internal linkage, so that each file that includes this has its own copy.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "formats/half.h"
#include "formats/quant_format.h"
#include "formats/quantize.h"

namespace ktqueue {
namespace {

// Four floats. Sums of lanes are added up in a fixed order, so bytes do not depend on the instruction set.
using Lanes = float __attribute__((vector_size(16)));
constexpr size_t kLanes = 4;

inline Lanes load(const float* values) {
    Lanes lanes;
    std::memcpy(&lanes, values, sizeof(lanes));
    return lanes;
}

inline Lanes broadcast(float value) {
    return Lanes{value, value, value, value};
}

inline double total(const Lanes& lanes) {
    return (static_cast<double>(lanes[0]) + lanes[1]) + (static_cast<double>(lanes[2]) + lanes[3]);
}

// The nearest whole number, ties to even, of numbers below 2^22.
inline Lanes round_lanes(const Lanes& y) {
    const Lanes shift = broadcast(12582912.0f);
    return (y + shift) - shift;
}

// Whole numbers from Low to High, stored as their distance from Low.
template <int Low, int High>
struct Steps {
    static constexpr float kLow = Low, kHigh = High, kGap = 1;
    static Lanes nearest(const Lanes& y) {
        const Lanes low = broadcast(kLow), high = broadcast(kHigh);
        const Lanes above = y < low ? low : y;
        return round_lanes(above > high ? high : above);
    }
    static int code(float value) { return static_cast<int>(value) - Low; }
};

// The values of IQ4_NL and IQ4_XS, stored as their index.
struct Iq4Values {
    static constexpr float kLow = -127, kHigh = 113, kGap = 20;
    static Lanes nearest(const Lanes& y) {
        Lanes value = broadcast(kLow);
        for (int i = 1; i < 16; ++i) {
            const float below = kIQ4Values[i - 1], above = kIQ4Values[i];
            value += y > broadcast((below + above) / 2) ? broadcast(above - below) : broadcast(0);
        }
        return value;
    }
    static int code(float value) {
        return static_cast<int>(std::lower_bound(kIQ4Values, kIQ4Values + 16, value) - kIQ4Values);
    }
};

// Weighted sums over a sub-block with codes q: of the squared error, and what the best scale and minimum need.
struct Sums {
    double error = 0, w = 0, q = 0, qq = 0, x = 0, xq = 0;
};

// Rounds to codes with x = step * q - offset. A step of 0 means that all codes are Codes::kLow or 0, whichever is nearer
// to 0.
template <class Codes, size_t N>
inline Sums measure(const float* x, const float* w, float step, float offset) {
    const float inverse = step == 0 ? 0 : 1 / step;
    if (!std::isfinite(inverse)) return measure<Codes, N>(x, w, 0, offset);
    Lanes error{}, sum_w{}, sum_q{}, sum_qq{}, sum_x{}, sum_xq{};
    for (size_t i = 0; i < N; i += kLanes) {
        const Lanes xs = load(x + i), ws = load(w + i);
        const Lanes q = Codes::nearest((xs + offset) * inverse);
        const Lanes wq = ws * q, wx = ws * xs, miss = xs - (q * step - offset);
        error += ws * miss * miss;
        sum_w += ws;
        sum_q += wq;
        sum_qq += wq * q;
        sum_x += wx;
        sum_xq += wx * q;
    }
    return {total(error), total(sum_w), total(sum_q), total(sum_qq), total(sum_x), total(sum_xq)};
}

template <class Codes, size_t N>
void encode(const float* x, float step, float offset, uint8_t* codes) {
    const float inverse = step == 0 || !std::isfinite(1 / step) ? 0 : 1 / step;
    for (size_t i = 0; i < N; i += kLanes) {
        const Lanes q = Codes::nearest((load(x + i) + offset) * inverse);
        for (size_t lane = 0; lane < kLanes; ++lane) codes[i + lane] = static_cast<uint8_t>(Codes::code(q[lane]));
    }
}

// The half nearest to a number, as a float, but never infinite.
inline float as_half(double value) {
    const float clamped = std::clamp(static_cast<float>(value), -kMostMagnitude, kMostMagnitude);
    const uint16_t bits = float_to_half(clamped);
    uint8_t bytes[2];
    std::memcpy(bytes, &bits, 2);
    return half_to_float(bytes);
}

inline void store_half(uint8_t* bytes, float value) {
    const uint16_t bits = float_to_half(value);
    std::memcpy(bytes, &bits, 2);
}

// Tried scales put the largest value this far beyond the last code, in gaps between codes.
constexpr float kFirstTry = -1.25f, kTryStep = 0.15f;
constexpr int kTries = 20, kRefinements = 4;

// The step with the least error of x = step * q.
template <class Codes, size_t N>
float fit_step(const float* x, const float* w) {
    float extreme = 0;
    for (size_t i = 0; i < N; ++i)
        if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
    if (extreme == 0) return 0;
    double best_gain = 0;
    float best = 0;
    const auto attempt = [&](float inverse) {
        if (!std::isfinite(inverse)) return false;
        Lanes dot{}, norm{};
        for (size_t i = 0; i < N; i += kLanes) {
            const Lanes xs = load(x + i);
            const Lanes q = Codes::nearest(xs * inverse);
            const Lanes wq = load(w + i) * q;
            dot += wq * xs;
            norm += wq * q;
        }
        const double gain = total(dot), square = total(norm);
        if (square <= 0 || gain * gain <= best_gain * square) return false;
        best_gain = gain * gain / square;
        best = static_cast<float>(gain / square);
        return true;
    };
    for (int i = 0; i < kTries; ++i) {
        const float beyond = Codes::kGap * (kFirstTry + kTryStep * static_cast<float>(i));
        attempt((Codes::kHigh + beyond) / extreme);
        if (Codes::kLow != -Codes::kHigh) attempt((Codes::kLow - beyond) / extreme);
    }
    for (int i = 0; i < kRefinements && best != 0; ++i)
        if (!attempt(1 / best)) break;
    return best;
}

struct StepAndOffset {
    float step, offset;
};

// The step and offset with the least error of x = step * q - offset. Codes begin at 0. `Signed`: the offset may be below
// 0.
template <class Codes, size_t N, bool Signed>
StepAndOffset fit_step_and_offset(const float* x, const float* w) {
    const auto [least, most] = std::minmax_element(x, x + N);
    const float low = Signed ? *least : std::min(*least, 0.0f), range = *most - low;
    if (range <= 0) return {0, -low};
    double best_error = std::numeric_limits<double>::infinity();
    StepAndOffset best{0, -low};
    const auto attempt = [&](float step, float offset) {
        const float inverse = 1 / step;
        if (!std::isfinite(inverse)) return false;
        Lanes sum_w{}, sum_q{}, sum_qq{}, sum_x{}, sum_xq{}, sum_xx{};
        for (size_t i = 0; i < N; i += kLanes) {
            const Lanes xs = load(x + i) + offset, ws = load(w + i);  // near 0 or above, so little is cancelled below
            const Lanes q = Codes::nearest(xs * inverse);
            const Lanes wq = ws * q, wx = ws * xs;
            sum_w += ws;
            sum_q += wq;
            sum_qq += wq * q;
            sum_x += wx;
            sum_xq += wx * q;
            sum_xx += wx * xs;
        }
        const double ones = total(sum_w), q = total(sum_q), qq = total(sum_qq), xs = total(sum_x), xq = total(sum_xq);
        if (!(qq > 0)) return false;
        const double determinant = ones * qq - q * q;
        double new_step = xq / qq, shift = 0;
        if (determinant > 1e-6 * ones * qq) {  // else all codes are equal
            new_step = (ones * xq - xs * q) / determinant;
            shift = (qq * xs - xq * q) / determinant;
        }
        if (!Signed && offset - shift < 0) {  // the least allowed offset, 0
            shift = offset;
            new_step = (xq - shift * q) / qq;
        }
        if (!(new_step > 0)) return false;
        const double error = total(sum_xx) - 2 * (new_step * xq + shift * xs) + new_step * new_step * qq +
                             2 * new_step * shift * q + shift * shift * ones;
        if (error >= best_error) return false;
        best_error = error;
        best = {static_cast<float>(new_step), static_cast<float>(offset - shift)};
        return true;
    };
    for (int i = 0; i < kTries; ++i) {
        const float beyond = kFirstTry + kTryStep * static_cast<float>(i);
        if (Codes::kHigh + beyond > 0) attempt(range / (Codes::kHigh + beyond), -low);
    }
    for (int i = 0; i < kRefinements && best.step > 0; ++i)
        if (!attempt(best.step, best.offset)) break;
    return best;
}

constexpr size_t kSuperblock = 256;
constexpr int kRounds = 3;  // of choosing whole numbers and fitting their units

// The whole number nearest to value / unit, between low and high.
inline int whole(float value, float unit, int low, int high) {
    if (unit == 0) return 0;
    return static_cast<int>(std::lrint(std::clamp(value / unit, static_cast<float>(low), static_cast<float>(high))));
}

template <size_t N>
struct SteppedSuperblock {
    float d = 0;
    int scales[kSuperblock / N] = {};
};

// A superblock of sub-blocks of N values without minimums.
template <class Codes, size_t N, int Low, int High>
SteppedSuperblock<N> fit_superblock(const float* x, const float* w) {
    constexpr size_t kParts = kSuperblock / N;
    float steps[kParts], extreme = 0;
    for (size_t part = 0; part < kParts; ++part) {
        steps[part] = fit_step<Codes, N>(x + N * part, w + N * part);
        if (std::fabs(steps[part]) > std::fabs(extreme)) extreme = steps[part];
    }
    SteppedSuperblock<N> best, trial;
    double best_error = std::numeric_limits<double>::infinity();
    trial.d = as_half(extreme / Low);
    for (int round = 0; round < kRounds && trial.d != 0; ++round) {
        double error = 0, dot = 0, norm = 0;
        for (size_t part = 0; part < kParts; ++part) {
            const int wish = whole(steps[part], trial.d, Low, High);
            Sums least;
            least.error = std::numeric_limits<double>::infinity();
            for (int scale = std::max(Low, wish - 1); scale <= std::min(High, wish + 1); ++scale) {
                const Sums sums = measure<Codes, N>(x + N * part, w + N * part, trial.d * static_cast<float>(scale), 0);
                if (sums.error >= least.error) continue;
                least = sums;
                trial.scales[part] = scale;
            }
            error += least.error;
            dot += trial.scales[part] * least.xq;
            norm += trial.scales[part] * trial.scales[part] * least.qq;
        }
        if (error < best_error) {
            best_error = error;
            best = trial;
        }
        const float next = norm > 0 ? as_half(dot / norm) : 0;
        if (next == trial.d) break;
        trial.d = next;
    }
    return best;
}

template <size_t N>
struct OffsetSuperblock {
    float d = 0, m = 0;
    int scales[kSuperblock / N] = {}, mins[kSuperblock / N] = {};
};

// A superblock of sub-blocks of N values with minimums. `Most`: the largest stored scale and minimum.
template <class Codes, size_t N, int Most>
OffsetSuperblock<N> fit_offset_superblock(const float* x, const float* w) {
    constexpr size_t kParts = kSuperblock / N;
    StepAndOffset wishes[kParts];
    float most_step = 0, most_offset = 0;
    for (size_t part = 0; part < kParts; ++part) {
        wishes[part] = fit_step_and_offset<Codes, N, false>(x + N * part, w + N * part);
        most_step = std::max(most_step, wishes[part].step);
        most_offset = std::max(most_offset, wishes[part].offset);
    }
    OffsetSuperblock<N> best, trial;
    double best_error = std::numeric_limits<double>::infinity();
    trial.d = as_half(most_step / Most);
    trial.m = as_half(most_offset / Most);
    for (int round = 0; round < kRounds; ++round) {
        double error = 0, qq = 0, qm = 0, mm = 0, xq = 0, xm = 0;
        for (size_t part = 0; part < kParts; ++part) {
            const int scale_wish = whole(wishes[part].step, trial.d, 0, Most);
            const int min_wish = whole(wishes[part].offset, trial.m, 0, Most);
            Sums least;
            least.error = std::numeric_limits<double>::infinity();
            for (int scale = std::max(0, scale_wish - 1); scale <= std::min(Most, scale_wish + 1); ++scale)
                for (int min = std::max(0, min_wish - 1); min <= std::min(Most, min_wish + 1); ++min) {
                    const Sums sums = measure<Codes, N>(x + N * part, w + N * part, trial.d * static_cast<float>(scale),
                                                        trial.m * static_cast<float>(min));
                    if (sums.error >= least.error) continue;
                    least = sums;
                    trial.scales[part] = scale;
                    trial.mins[part] = min;
                }
            const double scale = trial.scales[part], min = trial.mins[part];
            error += least.error;
            qq += scale * scale * least.qq;
            qm += scale * min * least.q;
            mm += min * min * least.w;
            xq += scale * least.xq;
            xm += min * least.x;
        }
        if (error < best_error) {
            best_error = error;
            best = trial;
        }
        const double determinant = qq * mm - qm * qm;
        const bool has_both = determinant > 1e-9 * qq * mm;
        const double d = has_both ? (xq * mm - xm * qm) / determinant : qq > 0 ? xq / qq : 0;
        const double m = has_both ? (xq * qm - xm * qq) / determinant : trial.m;
        if (!(d >= 0) || !(m >= 0)) break;
        const float next_d = as_half(d), next_m = as_half(m);
        if (next_d == trial.d && next_m == trial.m) break;
        trial.d = next_d;
        trial.m = next_m;
    }
    return best;
}

}  // namespace
}  // namespace ktqueue
