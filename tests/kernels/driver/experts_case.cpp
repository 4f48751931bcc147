// An expert layer with any formats, shapes, activations and routes, and with non-finite weights and activations.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <thread>

#include "cases.h"
#include "experts/expert_layer.h"
#include "handoff/handoff.h"
#include "kernels/prepared_rows.h"
#include "matrices.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

constexpr size_t kMostWork = 3'000'000;  // multiplications of a reference
constexpr double kRounding = 1e-4;       // of float32 sums, relative to their magnitude
constexpr double kTileRounding = 0.03;   // of weights and activations to bf16: many standard deviations
constexpr double kTileStep = 0x1p-23;    // of small weights, relative to the largest one with the same unit

// One matrix of all experts.
struct Stack {
    std::vector<Matrix> matrices;
    std::vector<float> bias;

    Stack(Random& random, size_t experts, Quant quant, size_t rows, size_t columns) {
        for (size_t e = 0; e < experts; ++e) matrices.emplace_back(random, quant, rows, columns);
        for (Matrix& matrix : matrices)
            for (const Matrix& other : matrices) matrix.share_tiles_with(other);
        if (random.chance(2))
            for (size_t i = 0; i < experts * rows; ++i) bias.push_back(random.normal());
    }

    ExpertMatrices stored() const {
        ExpertMatrices result{matrices[0].quant(), matrices[0].rows(), matrices[0].columns(), {}, bias};
        for (const Matrix& matrix : matrices) result.data.push_back(matrix.data());
        return result;
    }

    double largest() const { return matrices[0].largest(); }

    bool good() const {
        return std::ranges::all_of(matrices, [](const Matrix& matrix) { return matrix.bad_rows().empty(); });
    }

    double bias_of(size_t expert, size_t row) const {
        return bias.empty() ? 0 : bias[expert * matrices[0].rows() + row];
    }
};

// A number and the largest error that a kernel may make.
struct Value {
    double value, error;
};

double sigmoid(double x) {
    return 1 / (1 + std::exp(-x));
}

// Returns the factors of gate and up.
std::pair<double, double> activate(const ExpertOptions& options, double gate, double up) {
    switch (options.activation) {
        case Activation::Silu:
            return {gate * sigmoid(gate), up};
        case Activation::Gelu:
            return {gate / 2 * std::erfc(-gate / std::sqrt(2.0)), up};
        case Activation::GeluTanh:
            return {gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)), up};
        case Activation::SwigluClamped: {
            const double clamped = std::min<double>(gate, options.limit);
            return {clamped * sigmoid(options.alpha * clamped),
                    std::clamp<double>(up, -options.limit, options.limit) + 1};
        }
        case Activation::SiluLimited:
            return {std::min<double>(gate * sigmoid(gate), options.limit),
                    std::clamp<double>(up, -options.limit, options.limit)};
    }
    throw std::logic_error("activation");
}

struct Layer {
    Quant quants[3];
    size_t experts, hidden, intermediate;
    Stack gate, up, down;
    ExpertOptions options;

    Layer(Random& random, const std::vector<Quant>& three, size_t experts, size_t hidden, size_t intermediate)
        : quants{three[0], three[1], three[2]},
          experts(experts),
          hidden(hidden),
          intermediate(intermediate),
          gate(random, experts, three[0], intermediate, hidden),
          up(random, experts, three[1], intermediate, hidden),
          down(random, experts, three[2], hidden, intermediate),
          options{static_cast<Activation>(random.number(0, 3)), 0.5f + 0.1f * static_cast<float>(random.number(0, 15)),
                  0.1f * static_cast<float>(random.number(1, 90)),
                  random.chance(2) ? Precision::Fast : Precision::Exact, random.chance(4)} {}

    std::string name() const {
        std::string result;
        for (const Quant quant : quants) result += std::string(quant_format(quant).name) + " ";
        return result + std::to_string(experts) + " x " + std::to_string(hidden) + " x " + std::to_string(intermediate);
    }

    Value product(const Stack& stack, size_t expert, size_t row, const std::vector<double>& x, bool tiles,
                  double factor = 1) const {
        const Matrix::Product product = stack.matrices[expert].times(row, x);
        const double bias = stack.bias_of(expert, row), size = std::fabs(factor);
        if (!(product.size * std::max(1.0, size) < (tiles ? 1e27 : 1e30))) return {0, INFINITY};  // sums may overflow
        const double error = kRounding * (size * product.size + std::fabs(bias)) + 1e-30;
        // Gate and up have one unit, since they share the rows of x.
        const double largest = &stack == &down ? 0 : std::max(gate.largest(), up.largest());
        const double of_tiles = kTileRounding * product.root + kTileStep * largest * product.sum;
        return {factor * product.value + bias, error + (tiles ? size * of_tiles : 0)};
    }

    // Computes expert(factor * x), each number with the error that it may have. `tiles`: whether gate, up and down use
    // tiles.
    std::vector<Value> run(size_t expert, const float* x, const bool (&tiles)[3], double factor) const {
        const auto seen_by = [&](size_t matrix, const float* row, size_t columns) {
            return seen(row, columns, quants[matrix], tiles[matrix] ? Precision::Exact : options.precision);
        };
        const std::vector<double> gate_x = seen_by(0, x, hidden), up_x = seen_by(1, x, hidden);
        std::vector<float> mid(intermediate);
        std::vector<double> errors(intermediate);
        for (size_t i = 0; i < intermediate; ++i) {
            const Value g = product(gate, expert, i, gate_x, tiles[0], factor);
            const Value u = product(up, expert, i, up_x, tiles[1], factor);
            if (g.error + u.error == INFINITY) return std::vector<Value>(hidden, {0, INFINITY});
            const auto [activated, factor] = activate(options, g.value, u.value);
            mid[i] = static_cast<float>(activated * factor);
            errors[i] = 1.2 * g.error * (std::fabs(factor) + u.error) + std::fabs(activated) * u.error +
                        1e-5 * std::fabs(g.value) * (std::fabs(factor) + 1);
        }
        if (!takes_floats(quants[2]) && options.precision == Precision::Fast && !tiles[2])
            for (size_t begin = 0; begin < intermediate;
                 begin += kSlab) {  // a number near an edge may be rounded to the other step
                double largest = 0, error = 0;
                for (size_t i = begin; i < begin + kSlab; ++i) {
                    largest = std::max<double>(largest, std::fabs(mid[i]));
                    error = std::max(error, errors[i]);
                }
                for (size_t i = begin; i < begin + kSlab; ++i) errors[i] = 2 * error + largest / 127;
            }
        const std::vector<double> mid_x = seen_by(2, mid.data(), intermediate);
        std::vector<Value> result(hidden);
        for (size_t h = 0; h < hidden; ++h) {
            result[h] = product(down, expert, h, mid_x, tiles[2]);
            double sum = 0, squares = 0;
            for (size_t i = 0; i < intermediate; ++i) {
                const double error = std::fabs(down.matrices[expert].weight(h, i)) * errors[i];
                sum += error;
                squares += error * error;
            }
            // Errors of tiles have random signs. For the others this is the worst case.
            result[h].error += tiles[0] || tiles[1] ? std::sqrt(squares) : sum;
        }
        return result;
    }
};

struct Call {
    size_t tokens, slots;
    Guarded<float> x;
    Guarded<int64_t> ids;
    Guarded<float> weights;

    Call(Random& random, size_t tokens, size_t slots, const Layer& layer)
        : tokens(tokens),
          slots(slots),
          x(random, random.floats(tokens * layer.hidden)),
          ids(random, tokens * slots),
          weights(random, random.floats(tokens * slots)) {
        const bool same = random.chance(4);  // all tokens on one expert
        const size_t expert = random.number(0, layer.experts - 1);
        for (int64_t& id : ids) id = static_cast<int64_t>(same ? expert : random.number(0, layer.experts - 1));
        if (random.chance(4))
            for (int64_t& id : ids)
                if (random.chance(2)) id = -1;  // no expert
    }

    void run(const ExpertLayer& layer, float* out) const {
        layer.forward(x.data(), ids.data(), weights.data(), tokens, slots, out);
    }
};

// Compares each number of each token with float64 on the decoded weights.
void check(const Layer& layer, const Call& call, const KernelTable& kernels, const Guarded<float>& out) {
    std::vector<size_t> rows(layer.experts);
    for (const int64_t id : call.ids)
        if (id >= 0) ++rows[static_cast<size_t>(id)];
    for (size_t t = 0; t < call.tokens; ++t) {
        const float* x = call.x.data() + t * layer.hidden;
        const float* got = out.data() + t * layer.hidden;
        const std::string place = layer.name() + ", token " + std::to_string(t);
        if (std::any_of(x, x + layer.hidden, [](float value) { return std::isnan(value); })) {
            const int64_t* ids = call.ids.data() + t * call.slots;
            if (std::any_of(ids, ids + call.slots, [](int64_t id) { return id >= 0; }))
                require(std::all_of(got, got + layer.hidden, [](float value) { return std::isnan(value); }),
                        place + ": a number out of none");
            continue;
        }
        std::vector<Value> expected(layer.hidden, {0, 1e-30});
        for (size_t pair = t * call.slots; pair < (t + 1) * call.slots; ++pair) {
            if (call.ids[pair] < 0) continue;
            const auto expert = static_cast<size_t>(call.ids[pair]);
            bool tiles[3];
            for (size_t i = 0; i < 3; ++i)
                tiles[i] =
                    at_constant_distance(row_form(kernels, layer.quants[i], layer.options.precision, rows[expert], 1));
            const bool of_input = layer.options.weighted_input;
            const std::vector<Value> values = layer.run(expert, x, tiles, of_input ? call.weights[pair] : 1);
            const double weight = of_input ? 1 : call.weights[pair];
            for (size_t h = 0; h < layer.hidden; ++h) {
                expected[h].value += weight * values[h].value;
                expected[h].error += std::fabs(weight) * (values[h].error + 1e-6 * std::fabs(values[h].value));
            }
        }
        for (size_t h = 0; h < layer.hidden; ++h) {
            if (!(std::fabs(expected[h].value) + expected[h].error < 1e30)) continue;
            const double error = std::fabs(got[h] - expected[h].value);
            require(error <= expected[h].error,
                    place + ", column " + std::to_string(h) + ": " + std::to_string(got[h]) + " for " +
                        std::to_string(expected[h].value) + ", off by " + std::to_string(error) + " of at most " +
                        std::to_string(expected[h].error));
        }
    }
}

// Checks that the constructor accepts good weights and refuses bad scales and shapes that disagree.
std::optional<ExpertLayer> make(Random& random, const Layer& layer, const KernelTable& kernels) {
    std::optional<ExpertLayer> made;
    ExpertMatrices three[] = {layer.gate.stored(), layer.up.stored(), layer.down.stored()};
    const bool damaged = random.chance(12);
    if (damaged) {
        ExpertMatrices& matrices = random.element(three);
        const size_t kind = random.number(0, 3);
        if (kind == 0) matrices.rows += random.number(1, 3);
        if (kind == 1) matrices.columns += random.number(1, 3);
        if (kind == 2) matrices.data.resize(random.number(0, layer.experts - 1));
        if (kind == 3) matrices.bias.resize(layer.experts * matrices.rows + random.number(1, 3));
    }
    try {
        made.emplace(std::move(three[0]), std::move(three[1]), std::move(three[2]), layer.options, kernels);
    } catch (const std::invalid_argument& error) {
        if (damaged) return {};
        const std::string message = error.what();
        const std::pair<const char*, const Stack*> stacks[] = {
            {"gate", &layer.gate}, {"up", &layer.up}, {"down", &layer.down}};
        for (const auto& [name, stack] : stacks)
            for (size_t e = 0; e < layer.experts; ++e)
                if (message.starts_with(std::string(name) + " of expert " + std::to_string(e) + ": ") &&
                    names_a_bad_row(message, stack->matrices[e]))
                    return {};
        require(false, "refused: " + message);
    }
    require(!damaged, layer.name() + ": shapes that disagree were taken");
    require(layer.gate.good() && layer.up.good() && layer.down.good(), "a scale that is not finite was taken");
    return made;
}

bool equal(const Guarded<float>& a, const Guarded<float>& b) {
    return a.size() == 0 || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
}

// Runs the same request several times through a hand-off. This thread plays the GPU.
void run_through_handoff(Random& random, const ExpertLayer& layer, const Call& call, const Guarded<float>& out) {
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    const HandoffShape shape{layer.hidden(), call.slots, call.tokens};
    const size_t pairs = call.tokens * call.slots;
    std::vector<Line> input(shape.input_bytes(call.tokens) / 64 + 1), words(4), result(4 * out.size() / 64 + 1);
    auto* answer = reinterpret_cast<float*>(result.data());
    Handoff handoff(shape, {input[0].bytes, answer, &words[0], &words[2]}, true, {random.chance(2) ? 0.0 : 1.0, 600.0});
    auto* request = reinterpret_cast<std::atomic<uint32_t>*>(&words[0]);
    auto* done = reinterpret_cast<std::atomic<uint32_t>*>(&words[2]);
    auto* predicted = reinterpret_cast<int64_t*>(input[0].bytes + shape.predicted_offset(call.tokens));
    const size_t number = handoff.add_layer(layer);
    const auto word = static_cast<uint32_t>(call.tokens << Handoff::kTokensAt | Handoff::kPredicts | (number + 1));
    handoff.add_layer(layer);  // the layer whose experts are predicted
    for (size_t replay = 0; replay < 3; ++replay) {
        std::memcpy(input[0].bytes, call.ids.data(), 8 * pairs);
        std::memcpy(input[0].bytes + 8 * pairs, call.weights.data(), 4 * pairs);
        std::memcpy(input[0].bytes + shape.x_offset(call.tokens), call.x.data(), 4 * call.x.size());
        std::memset(answer, 0x55, 4 * out.size());
        done->store(0, std::memory_order_relaxed);
        request->store(word, std::memory_order_release);
        for (size_t i = 0; i < pairs; ++i) {  // the service may still read the ids of the previous replay
            const auto id = static_cast<int64_t>(random.number(0, 2 * layer.experts())) - 1;  // sometimes no expert
            __atomic_store_n(predicted + i, id, __ATOMIC_RELAXED);
        }
        while (done->load(std::memory_order_acquire) != word) std::this_thread::yield();
        require(std::memcmp(answer, out.data(), 4 * out.size()) == 0, "differs through a hand-off");
    }
    require(!handoff.take_error() && handoff.statistics().tasks == 3, "a hand-off miscounts");
    require(handoff.close(600), "a hand-off does not close");
}

}  // namespace

void run_experts(Random& random, const KernelTable& kernels) {
    set_shared_pool(random.number(1, 3), 20, Pin::off);
    const std::vector<Quant> three = random_quants(random, 3);
    const size_t hidden = random_columns(random, {three[0], three[1]}, 512);
    const size_t intermediate = random_columns(random, {three[2]}, 512);
    const Layer layer(random, three, random.number(1, 5), hidden, intermediate);
    const std::optional<ExpertLayer> made = make(random, layer, kernels);
    if (!made) return;
    const size_t slots = random.number(0, 4), work = 3 * hidden * intermediate * std::max<size_t>(slots, 1);
    const size_t most = std::clamp<size_t>(kMostWork / work, 1, random.chance(8) ? 150 : 12);
    const Call call(random, random.number(0, most), slots, layer);
    const size_t size = call.tokens * hidden;

    const Guarded<float> out = untouched_floats(random, size);
    call.run(*made, out.data());
    check(layer, call, kernels, out);

    // From several threads, while the pool is replaced: the results must have the same bits.
    if (random.chance(4)) {
        std::vector<Guarded<float>> outs;
        for (size_t i = 0; i < 3; ++i) outs.push_back(untouched_floats(random, size));
        std::vector<std::thread> threads;
        for (const Guarded<float>& result : outs) threads.emplace_back([&] { call.run(*made, result.data()); });
        set_shared_pool(random.number(1, 3), 20, Pin::off);
        for (std::thread& thread : threads) thread.join();
        for (const Guarded<float>& result : outs) require(equal(result, out), layer.name() + ": threads differ");
    }

    if (call.tokens * slots == 0) return;
    if (random.chance(4)) run_through_handoff(random, *made, call, out);
    const int64_t wrong[] = {-2, static_cast<int64_t>(layer.experts), INT64_MAX, INT64_MIN, 1ll << 32};
    random.element(call.ids) = random.element(wrong);
    const Guarded<float> nothing = untouched_floats(random, size);
    try {
        call.run(*made, nothing.data());
    } catch (const std::invalid_argument&) {
        require(std::all_of(nothing.begin(), nothing.end(), untouched), "wrote in spite of a wrong id");
        return;
    }
    require(false, "took an id that is no expert");
}

}  // namespace ktqueue
