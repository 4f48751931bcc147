// Packed matrices times rows with any format, shape and stride, and with non-finite weights and activations.
#include <algorithm>
#include <optional>
#include <stdexcept>
#include <thread>

#include "cases.h"
#include "matrices.h"
#include "model/linear.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

constexpr size_t kMostColumns = 768;
constexpr double kTileRounding = 0.03;  // of weights and activations to bf16: many standard deviations

// Rows of x or y with gaps between them. The last row ends where the memory ends.
struct Rows {
    size_t tokens, stride;
    Guarded<float> values;
    float* row(size_t t) const { return values.data() + t * stride; }
};

size_t extent(size_t tokens, size_t stride, size_t columns) {
    return tokens == 0 ? 0 : (tokens - 1) * stride + columns;
}

struct LinearCase {
    Matrix matrix;
    std::vector<float> bias;
    Precision precision;
    std::optional<Linear> linear;

    LinearCase(Random& random, Quant quant, size_t columns, Precision precision)
        : matrix(random, quant, random.number(0, 70), columns), precision(precision) {
        if (random.chance(2))
            for (size_t r = 0; r < matrix.rows(); ++r) bias.push_back(random.normal());
    }

    // Returns whether the weights were accepted. If they are refused, the message must name a bad row.
    bool make(const KernelTable& kernels) {
        try {
            linear.emplace(matrix.stored(), bias.empty() ? nullptr : bias.data(), precision, kernels);
        } catch (const std::invalid_argument& error) {
            require(names_a_bad_row(error.what(), matrix), std::string("refused: ") + error.what());
            return false;
        }
        require(matrix.bad_rows().empty(), "a scale that is not finite was taken");
        return true;
    }

    std::string name() const {
        return std::string(quant_format(matrix.quant()).name) + " " + std::to_string(matrix.rows()) + " x " +
               std::to_string(matrix.columns());
    }

    void check(const Rows& x, const Rows& y) const;
};

// Compares each result with float64 on the decoded weights, and checks that the gaps are untouched.
void LinearCase::check(const Rows& x, const Rows& y) const {
    const bool tiles = at_constant_distance(linear->form(x.tokens));
    for (size_t t = 0; t < x.tokens; ++t) {
        const float* row = x.row(t);
        bool finite = true;
        double largest = 0;
        for (size_t c = 0; c < matrix.columns(); ++c) {
            finite = finite && std::isfinite(row[c]);
            largest = std::max<double>(largest, std::fabs(row[c]));
        }
        const std::vector<double> exact =
            seen(row, matrix.columns(), matrix.quant(), tiles ? Precision::Exact : precision);
        for (size_t r = 0; r < matrix.rows(); ++r) {
            const double got = y.row(t)[r], added = bias.empty() ? 0 : bias[r];
            const std::string place = name() + ", row " + std::to_string(r) + ", token " + std::to_string(t);
            if (!finite) {
                require(!std::isfinite(got), place + ": finite out of what is not");
                continue;
            }
            const Matrix::Product product = matrix.times(r, exact);
            if (tiles && largest < 1e-30) continue;                  // tiles treat subnormal numbers as zero
            if (largest > 1e30 || !(product.size < 1e35)) continue;  // sums may overflow
            const double error = std::fabs(got - product.value - added);
            const double bound =
                1e-4 * (product.size + std::fabs(added)) + (tiles ? kTileRounding * product.root + 1e-6 : 1e-30);
            require(error <= bound, place + ": " + std::to_string(got) + " for " +
                                        std::to_string(product.value + added) + ", off by " + std::to_string(error) +
                                        " of at most " + std::to_string(bound));
        }
        if (t + 1 < x.tokens)
            for (size_t i = matrix.rows(); i < y.stride; ++i)
                require(untouched(y.row(t)[i]), name() + ": wrote between the rows");
    }
}

bool equal(const Rows& a, const Rows& b) {
    return a.values.size() == b.values.size() &&
           (a.values.size() == 0 || std::memcmp(a.values.data(), b.values.data(), 4 * a.values.size()) == 0);
}

Rows outputs(Random& random, size_t tokens, size_t rows, size_t stride) {
    return {tokens, stride, untouched_floats(random, extent(tokens, stride, rows))};
}

void refuses_bad_columns(Random& random, const KernelTable& kernels) {
    const uint8_t nothing = 0;  // never read
    for (size_t i = 0; i < kQuantCount; ++i) {
        const auto quant = static_cast<Quant>(i);
        const size_t block = quant_format(quant).block_weights;
        const size_t columns = block == 1 ? 0 : block * random.number(0, 3) + random.number(0, 1) * (block - 1);
        if (columns > 0 && columns % block == 0) continue;
        try {
            Linear({quant, 3, columns, &nothing}, nullptr, Precision::Fast, kernels);
        } catch (const std::invalid_argument&) {
            continue;
        }
        require(false, "took columns that do not fit");
    }
}

}  // namespace

void run_linear(Random& random, const KernelTable& kernels) {
    set_shared_pool(random.number(1, 3), 20, Pin::off);
    if (random.chance(20)) refuses_bad_columns(random, kernels);
    const std::vector<Quant> quants = random_quants(random, random.number(1, 3));
    const size_t columns = random_columns(random, quants, kMostColumns);
    const Precision precision = random.chance(2) ? Precision::Fast : Precision::Exact;
    std::vector<LinearCase> cases;
    for (const Quant quant : quants) {
        cases.emplace_back(random, quant, columns, precision);
        if (!cases.back().make(kernels)) return;
    }
    const size_t tokens = random.chance(8) ? random.number(64, 140) : random.number(0, 12);
    const size_t stride = columns + random.number(0, 1) * random.number(0, 20);
    const Rows x{tokens, stride, Guarded<float>(random, random.floats(extent(tokens, stride, columns)))};

    // Each call alone, then all at once from several threads while the pool is replaced: the same bits.
    std::vector<Rows> alone;
    for (const LinearCase& linear_case : cases) {
        const size_t rows = linear_case.matrix.rows();
        alone.push_back(outputs(random, tokens, rows, rows + random.number(0, 1) * random.number(0, 20)));
        linear_case.linear->forward(x.values.data(), x.stride, tokens, alone.back().values.data(), alone.back().stride);
        linear_case.check(x, alone.back());
    }
    const size_t callers = random.chance(4) ? 3 : 1;
    std::vector<std::vector<Rows>> together(callers);
    std::vector<std::vector<LinearCall>> calls(callers);
    for (size_t i = 0; i < callers; ++i)
        for (size_t k = 0; k < cases.size(); ++k) {
            together[i].push_back(outputs(random, tokens, cases[k].matrix.rows(), alone[k].stride));
            calls[i].push_back({&*cases[k].linear, together[i][k].values.data(), alone[k].stride});
        }
    std::vector<std::thread> threads;
    for (size_t i = 1; i < callers; ++i)
        threads.emplace_back(
            [&, i] { run_linears(calls[i].data(), calls[i].size(), x.values.data(), stride, tokens); });
    if (callers > 1) set_shared_pool(random.number(1, 3), 20, Pin::off);
    run_linears(calls[0].data(), calls[0].size(), x.values.data(), stride, tokens);
    for (std::thread& thread : threads) thread.join();
    for (const std::vector<Rows>& rows : together)
        for (size_t k = 0; k < rows.size(); ++k)
            require(equal(rows[k], alone[k]), cases[k].name() + ": differs in company");

    if (tokens == 0 || at_constant_distance(cases[0].linear->form(tokens))) return;
    const size_t t = random.number(0, tokens - 1);
    const size_t rows = cases[0].matrix.rows();
    const Rows single = outputs(random, 1, rows, rows);
    cases[0].linear->forward(x.row(t), stride, 1, single.values.data(), rows);
    require(rows == 0 || std::memcmp(single.values.data(), alone[0].row(t), 4 * rows) == 0,
            cases[0].name() + ": a token feels the others");
}

}  // namespace ktqueue
