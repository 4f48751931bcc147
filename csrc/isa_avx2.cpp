// The table of the AVX2 kernels. Compiled with -mavx2 -mfma -mf16c: nothing here may be inlined or shared elsewhere.
#include "quant_decode_avx2.h"
// The kernels are written against the decoders and vectors above.
#include "attention_kernels.h"
#include "expert_kernels.h"

namespace ktqueue {

const KernelTable& avx2_kernels() {
    static constexpr KernelTable kTable = {
        "avx2",
        {matrix<DecodeF32>, matrix<DecodeF16>, matrix<DecodeBF16>, matrix<DecodeQ4_0>, matrix<DecodeQ8_0>,
         matrix<DecodeQ4_K>, matrix<DecodeQ5_K>, matrix<DecodeQ6_K>},
        {dequantize<DecodeF32>, dequantize<DecodeF16>, dequantize<DecodeBF16>, dequantize<DecodeQ4_0>,
         dequantize<DecodeQ8_0>, dequantize<DecodeQ4_K>, dequantize<DecodeQ5_K>, dequantize<DecodeQ6_K>},
        silu_gate,
        attention,
    };
    return kTable;
}

}  // namespace ktqueue
