// AMX has eight tiles of 16 rows of 64 bytes. Six are sums, because a product can start every 16 cycles and takes 52
// (Intel's Optimization Reference Manual, AMX). The other two are operands. The configuration is 64 bytes, palette 1:
// bytes 16 + 2i hold the bytes per row of tile i, byte 48 + i its rows (Software Developer's Manual, LDTILECFG).
#include <immintrin.h>

#include "isa/cpu_features.h"
#include "probe/table.h"

namespace ktqueue {

namespace {

constexpr size_t kTiles = 8, kRows = 16, kRowBytes = 64, kSums = 6;

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Sets up the calling thread's tiles: sums 0 to 5 are zero, operands 6 and 7 hold `pattern` in each pair of bytes.
void fill_tiles(uint16_t pattern) {
    TileConfig config;
    for (size_t i = 0; i < kTiles; ++i) {
        config.row_bytes[i] = kRowBytes;
        config.rows[i] = kRows;
    }
    alignas(64) uint16_t operand[kRows * kRowBytes / 2];
    for (uint16_t& value : operand) value = pattern;
    // The intrinsics of GCC 12 do not declare what memory they read. Without this line it would remove the stores
    // above.
    asm volatile("" : : "r"(&config), "r"(operand) : "memory");
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_loadd(6, operand, kRowBytes);
    _tile_loadd(7, operand, kRowBytes);
}

void int8_peak(size_t rounds) {
    fill_tiles(0x0303);
    for (size_t i = 0; i < rounds; ++i) {
        _tile_dpbusd(0, 6, 7);
        _tile_dpbusd(1, 6, 7);
        _tile_dpbusd(2, 6, 7);
        _tile_dpbusd(3, 6, 7);
        _tile_dpbusd(4, 6, 7);
        _tile_dpbusd(5, 6, 7);
    }
    _tile_release();
}

void bf16_peak(size_t rounds) {
    fill_tiles(0x3f80);  // 1.0
    for (size_t i = 0; i < rounds; ++i) {
        _tile_dpbf16ps(0, 6, 7);
        _tile_dpbf16ps(1, 6, 7);
        _tile_dpbf16ps(2, 6, 7);
        _tile_dpbf16ps(3, 6, 7);
        _tile_dpbf16ps(4, 6, 7);
        _tile_dpbf16ps(5, 6, 7);
    }
    _tile_release();
}

// Sums of one tile product: 16 x 16, each over 64 bytes or 32 bf16.
constexpr double kProducts = 16.0 * 16.0;

}  // namespace

const ProbeTable& amx_probes() {
    static const ProbeTable table = {
        "amx",
        has_amx,
        nullptr,
        {{"tdpbusd", 2.0 * kProducts * 64 * kSums, int8_peak},
         {"tdpbf16ps", 2.0 * kProducts * 32 * kSums, bf16_peak},
         {}},
    };
    return table;
}

}  // namespace ktqueue
