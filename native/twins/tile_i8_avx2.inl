// 4 x 16 similarities in registers from int8: what AVX2 and AVX-VNNI share. Needs `accumulate`, which adds to
// 8 sums the products of 4 unsigned bytes with 4 signed ones each.
namespace twinkv {
namespace {

void tile(const Operand& a, int64_t group, const Operand& b, int64_t panel, float* out) {
    const auto* rows = static_cast<const uint8_t*>(a.rows) + group * tile_size * a.k;
    const auto* columns = static_cast<const int8_t*>(b.panels) + panel * tile_size * b.k;
    const int32_t* start = b.panel_start + panel * tile_size;
    const float* row_scale = a.row_scale + group * tile_size;
    const float* column_scale = b.panel_scale + panel * tile_size;
    for (int64_t c = 0; c < tile_size; c += 16) {
        const __m256i start_x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(start + c));
        const __m256i start_y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(start + c + 8));
        for (int64_t r = 0; r < tile_size; r += 4) {
            const uint8_t* row = rows + r * a.k;
            __m256i sums[4][2] = {
                {start_x, start_y}, {start_x, start_y}, {start_x, start_y}, {start_x, start_y}};
            for (int64_t k = 0; k < a.k; k += 4) {
                const auto* lane = reinterpret_cast<const __m256i*>(columns + k * tile_size + 4 * c);
                const __m256i x = _mm256_loadu_si256(lane), y = _mm256_loadu_si256(lane + 1);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    int32_t four;
                    __builtin_memcpy(&four, row + i * a.k + k, 4);
                    const __m256i value = _mm256_set1_epi32(four);
                    sums[i][0] = accumulate(sums[i][0], value, x);
                    sums[i][1] = accumulate(sums[i][1], value, y);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const __m256 scale = _mm256_broadcast_ss(row_scale + r + i);
                float* to = out + (r + i) * tile_size + c;
                for (int half = 0; half < 2; ++half) {
                    const __m256 s = _mm256_mul_ps(scale, _mm256_loadu_ps(column_scale + c + 8 * half));
                    _mm256_storeu_ps(to + 8 * half, _mm256_mul_ps(_mm256_cvtepi32_ps(sums[i][half]), s));
                }
            }
        }
    }
}

} // namespace
} // namespace twinkv
