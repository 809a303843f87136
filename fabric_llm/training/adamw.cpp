// plain_update of adamw_rounded.py in one pass over memory: the same operations in the same order, so the same bits.
// Compile without contraction (a * b + c in one rounding) and without any of -ffast-math; adamw_rounded.py does.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

static inline float widen(uint16_t bfloat16) {
    const uint32_t bits = uint32_t(bfloat16) << 16;
    float value;
    // memcpy, since C++ leaves a cast of the pointer undefined
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t round_up_or_down(float value, uint32_t noise) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = value == value ? bits : 0x7FC00000u;  // one NaN for all, so that no carry reaches the sign
    return (bits + noise) >> 16;
}

constexpr int BLOCK = 256;  // the noise of so many elements is made at a time: two plain loops vectorise better than one

static void update_piece(
    uint16_t *__restrict param, const uint16_t *__restrict grad, uint16_t *__restrict exp_avg,
    uint16_t *__restrict exp_avg_sq, int64_t count, uint32_t first, uint32_t key0, uint32_t key1, uint32_t key2,
    float decay, float grad_weight, float beta2, float square_weight, float bias, float eps, float step_size) {
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int size = count - start < BLOCK ? count - start : BLOCK;
        uint32_t two[BLOCK], one[BLOCK];  // for parameter and exp_avg, and for exp_avg_sq
        for (int i = 0; i < size; i++) {
            uint32_t x = (first + uint32_t(start) + uint32_t(i)) ^ key0;
            x = ((x ^ (x >> 16)) * 0x7FEB352Du) ^ key1;
            x = (x ^ (x >> 15)) * 0x846CA68Bu;
            x ^= x >> 16;
            two[i] = x;
            x ^= key2;
            one[i] = (x ^ (x >> 15)) * 0x31848BABu;
        }
        for (int i = 0; i < size; i++) {
            const int64_t at = start + i;
            const float g = widen(grad[at]);
            float p = widen(param[at]), m = widen(exp_avg[at]), v = widen(exp_avg_sq[at]);
            m = m + (g - m) * grad_weight;
            v = v * beta2 + g * g * square_weight;
            p = p * decay - m / (std::sqrt(v) * bias + eps) * step_size;
            param[at] = round_up_or_down(p, two[i] >> 16);
            exp_avg[at] = round_up_or_down(m, two[i] & 0xFFFF);
            exp_avg_sq[at] = round_up_or_down(v, one[i] >> 16);
        }
    }
}

struct Piece {  // a row of rows_of
    uint16_t *param, *grad, *exp_avg, *exp_avg_sq;
    int64_t count, first, key0, key1, key2;
};

extern "C" void update(
    const Piece *pieces, int64_t count, int threads, float decay, float grad_weight, float beta2, float square_weight,
    float bias, float eps, float step_size) {
    // each thread takes the next piece once it is free, because pieces differ in size
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t i; (i = next++) < count;) {
            const Piece &a = pieces[i];
            update_piece(a.param, a.grad, a.exp_avg, a.exp_avg_sq, a.count, a.first, a.key0, a.key1, a.key2,
                         decay, grad_weight, beta2, square_weight, bias, eps, step_size);
        }
    };
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads && i < count; i++) others.emplace_back(work);
    work();
    for (auto &other : others) other.join();
}
