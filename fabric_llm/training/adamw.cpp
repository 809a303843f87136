// adamw_plain.update for bfloat16 in one pass over memory: the same operations in the same order, so the same bits.
// Compile without contraction (a * b + c in one rounding) and without any of -ffast-math; adamw_cpu.py does.

#include <cmath>
#include <cstdint>
#include <cstring>

static inline float widen(uint16_t bfloat16) {
    const uint32_t bits = uint32_t(bfloat16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t round_up_or_down(float value, uint32_t noise) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return value == value ? (bits + noise) >> 16 : 0x7FC0;  // one NaN for all: no carry reaches the sign
}

extern "C" void update(
    uint16_t *__restrict param, const uint16_t *__restrict grad, uint16_t *__restrict exp_avg,
    uint16_t *__restrict exp_avg_sq, int64_t count, uint32_t first, uint32_t key0, uint32_t key1, uint32_t key2,
    float decay, float grad_weight, float beta2, float square_weight, float bias, float eps, float step_size) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t x = (first + uint32_t(i)) ^ key0;
        x = ((x ^ (x >> 16)) * 0x7FEB352Du) ^ key1;
        x = (x ^ (x >> 15)) * 0x846CA68Bu;
        x ^= x >> 16;
        uint32_t y = x ^ key2;
        y = (y ^ (y >> 15)) * 0x31848BABu;

        const float g = widen(grad[i]);
        float p = widen(param[i]), m = widen(exp_avg[i]), v = widen(exp_avg_sq[i]);
        m = m + (g - m) * grad_weight;
        v = v * beta2 + g * g * square_weight;
        p = p * decay - m / (std::sqrt(v) * bias + eps) * step_size;

        param[i] = round_up_or_down(p, x >> 16);
        exp_avg[i] = round_up_or_down(m, x & 0xFFFF);
        exp_avg_sq[i] = round_up_or_down(v, y >> 16);
    }
}
