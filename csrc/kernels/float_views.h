// The packed formats of floats, each as a view of one superblock. They are multiplied by float activations.
// Included only by translation units of one instruction set, after a lanes header; internal linkage.
#pragma once

#include "formats/panel_layout.h"

namespace ktqueue {
namespace {

// A view of one superblock of a format's panels: of a value of panel_format().
template <Quant Format>
struct Panel;

// Float formats are stored as they are: their superblocks are plain runs of slabs.
template <>
struct Panel<Quant::F32> {
    static constexpr Quant kQuant = Quant::F32;
    const uint8_t* block;
    Panel(const uint8_t* block, size_t) : block(block) {}
    void floats(size_t slab, size_t j, Floats (&weights)[8]) const {
        for (size_t i = 0; i < 8; ++i)
            weights[i] = load_floats(reinterpret_cast<const float*>(block + slab * 2048 + (8 * j + i) * 64));
    }
};

template <>
struct Panel<Quant::F16> {
    static constexpr Quant kQuant = Quant::F16;
    const uint8_t* block;
    Panel(const uint8_t* block, size_t) : block(block) {}
    void floats(size_t slab, size_t j, Floats (&weights)[8]) const {
        for (size_t i = 0; i < 8; ++i) weights[i] = load_halves(block + slab * 1024 + (8 * j + i) * 32);
    }
};

template <>
struct Panel<Quant::BF16> {
    static constexpr Quant kQuant = Quant::BF16;
    const uint8_t* block;
    Panel(const uint8_t* block, size_t) : block(block) {}
    void floats(size_t slab, size_t j, Floats (&weights)[8]) const {
        for (size_t i = 0; i < 8; i += 2)
            load_bf16_pair(block + slab * 1024 + (8 * j + i) * 32, weights[i], weights[i + 1]);
    }
};

// Numbers of eight bits with scales.
template <>
struct Panel<Quant::FP8> {
    static constexpr Quant kQuant = Quant::FP8;
    static constexpr bool kMinimums = false;
    const uint8_t* block;
    Panel(const uint8_t* block, size_t) : block(block) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        const uint8_t* codes = part(slab) + slab % kFP8Slabs * 512 + j * 128;
        even = load_bytes(codes);
        odd = load_bytes(codes + 64);
    }
    Floats scale(size_t slab, size_t) const {
        return load_floats(reinterpret_cast<const float*>(part(slab) + kFP8Bytes - 64));
    }
    void floats(size_t slab, size_t j, Floats (&weights)[8]) const {
        const Floats factor = scale(slab, 0);
        Bytes both[2];
        lines(slab, j, both[0], both[1]);
        for (int i = 0; i < 8; ++i) weights[i] = times(factor, column_of_e4m3(both[i / 4], i % 4));
    }

  private:
    const uint8_t* part(size_t slab) const { return block + slab / kFP8Slabs * kFP8Bytes; }
};

}  // namespace
}  // namespace ktqueue
