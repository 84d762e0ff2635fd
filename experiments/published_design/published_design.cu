// The published design of a 4-bit matrix-vector product, re-created from its description, checked and timed.
//
//     nvcc -O3 -std=c++17 -arch=native -o published_design published_design.cu
//     ./published_design --rows=16384 --columns=5120
//
// Design: a warp takes a row, a lane takes a column of every group of 32. The lane walks along its row group by group,
// reads its byte, picks its nibble, extends the sign, multiplies by the group's scale and by x, and adds to one of four
// float32 chains; a butterfly over the warp ends the row. Rows are stored in tiles of four: per tile and group four
// float16 scales, then four times the sixteen bytes of 32 codes, low nibbles for columns 0 … 15, high for 16 … 31.
//
// Prints one line of JSON. Codes and scales are hashes of their position, on both sides, so the check against float64
// needs no copy of the weights. A wrong result is reported without times, a failure with exit status 1.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int kGroup = 32;
constexpr int kTileRows = 4;
constexpr int kTileBytes = kTileRows * (2 + kGroup / 2);  // of one group: scales, then codes
constexpr int kThreads = 256;
constexpr int kKernels = 128;
constexpr int kRounds = 9;
constexpr double kWarmMilliseconds = 250.0;
constexpr double kBound = 5e-6;  // of the largest result: float32 in another order of summation

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// A well mixed word for every position (Stafford's variant 13 of the splitmix64 finaliser).
__host__ __device__ uint32_t hash(uint64_t position) {
  uint64_t z = position + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>((z ^ (z >> 31)) >> 16);
}

// Byte j of the codes of one row of one tile in one group.
__host__ __device__ uint8_t code_byte(uint64_t tile, int row, int j) {
  return static_cast<uint8_t>(hash((tile * kTileRows + row) * 64 + j));
}

// Between 0.005 and 0.015.
__host__ __device__ float scale_value(uint64_t tile, int row) {
  return 0.005f + 0.01f * (hash((tile * kTileRows + row) * 64 + 32) >> 8) * 0x1p-24f;
}

__host__ __device__ int sign_extended(int nibble) { return (nibble ^ 8) - 8; }

__global__ void fill(uint8_t* weights, uint64_t tiles) {
  const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t tile = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x; tile < tiles; tile += stride) {
    uint8_t* bytes = weights + tile * kTileBytes;
    for (int row = 0; row < kTileRows; ++row) {
      reinterpret_cast<__half*>(bytes)[row] = __float2half(scale_value(tile, row));
      for (int j = 0; j < kGroup / 2; ++j) bytes[2 * kTileRows + row * kGroup / 2 + j] = code_byte(tile, row, j);
    }
  }
}

__device__ float weight(const uint8_t* bytes, int row, int lane) {
  const __half scale = reinterpret_cast<const __half*>(bytes)[row];  // a tile starts on an even address
  const uint8_t both = bytes[2 * kTileRows + row * kGroup / 2 + lane % (kGroup / 2)];
  return sign_extended(lane < kGroup / 2 ? both & 15 : both >> 4) * __half2float(scale);
}

__global__ void __launch_bounds__(kThreads) product(const uint8_t* __restrict__ weights, const float* __restrict__ x,
                                                    float* __restrict__ y, int rows, int groups) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const uint8_t* bytes = weights + static_cast<size_t>(row / kTileRows) * groups * kTileBytes;
  float chains[4] = {};
  int group = 0;
  for (; group + 4 <= groups; group += 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float w = weight(bytes + static_cast<size_t>(group + i) * kTileBytes, row % kTileRows, lane);
      chains[i] += w * x[(group + i) * kGroup + lane];
    }
  }
  for (; group < groups; ++group)
    chains[0] += weight(bytes + static_cast<size_t>(group) * kTileBytes, row % kTileRows, lane) * x[group * kGroup + lane];
  float total = (chains[0] + chains[1]) + (chains[2] + chains[3]);
  for (int offset = 16; offset; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
  if (lane == 0) y[row] = total;
}

struct Options {
  long rows = 16384, columns = 5120, rotate = 512'000'000;
  double seconds = 1.0;
};

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const size_t equals = argument.find('=');
    if (argument.rfind("--", 0) || equals == std::string::npos)
      throw std::invalid_argument("expected --NAME=VALUE, got " + argument);
    const std::string name = argument.substr(2, equals - 2), value = argument.substr(equals + 1);
    size_t used = 0;
    double number = 0;
    try {
      number = std::stod(value, &used);
    } catch (const std::exception&) {
      used = 0;
    }
    if (used != value.size() || value.empty()) throw std::invalid_argument(name + " must be a number, got " + value);
    if (name == "rows") options.rows = std::lround(number);
    else if (name == "columns") options.columns = std::lround(number);
    else if (name == "rotate") options.rotate = std::lround(number);
    else if (name == "seconds") options.seconds = number;
    else throw std::invalid_argument("unknown option --" + name + "; there are rows, columns, rotate, seconds");
  }
  if (options.rows < 1 || options.rows > 1L << 26 || options.columns < kGroup || options.columns % kGroup)
    throw std::invalid_argument("rows must be 1 to 2^26 and columns a multiple of 32");
  return options;
}

// Heavy-tailed, as activations are: a sine times a power of two whose exponent is large once in a while.
std::vector<float> activations(long columns) {
  std::vector<float> x(columns);
  for (long i = 0; i < columns; ++i) {
    const uint32_t draw = hash(~static_cast<uint64_t>(i));
    int exponent = 0;
    while (exponent < 7 && (draw >> (2 * exponent) & 3) == 0) ++exponent;
    x[i] = std::sin(0.37f * i) * static_cast<float>(1 << exponent);
  }
  return x;
}

// The largest error on a sample of rows of one layer, over the largest of their exact values.
double max_rel(const std::vector<float>& y, const std::vector<float>& x, uint64_t first_tile, long rows, int groups) {
  double error = 0, largest = 0;
  const long samples = std::min(rows, 96L);
  for (long i = 0; i < samples; ++i) {
    const long row = samples == 1 ? 0 : i * (rows - 1) / (samples - 1);
    double exact = 0;
    for (int group = 0; group < groups; ++group) {
      const uint64_t tile = first_tile + static_cast<uint64_t>(row / kTileRows) * groups + group;
      const double scale = __half2float(__float2half(scale_value(tile, row % kTileRows)));
      for (int j = 0; j < kGroup / 2; ++j) {
        const int both = code_byte(tile, row % kTileRows, j);
        const float* at = &x[static_cast<size_t>(group) * kGroup + j];
        exact += scale * (sign_extended(both & 15) * static_cast<double>(at[0]) +
                          sign_extended(both >> 4) * static_cast<double>(at[kGroup / 2]));
      }
    }
    const double off = std::abs(y[row] - exact);
    error = std::isfinite(off) ? std::max(error, off) : HUGE_VAL;
    largest = std::max(largest, std::abs(exact));
  }
  return error / largest;
}

double percentile(std::vector<double> sorted, double share) {
  std::sort(sorted.begin(), sorted.end());
  const double at = share * (sorted.size() - 1);
  const size_t below = static_cast<size_t>(at), above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - below) * (sorted[above] - sorted[below]);
}

void run(const Options& options) {
  const long rows = options.rows;
  const int groups = static_cast<int>(options.columns / kGroup);
  const uint64_t tiles = static_cast<uint64_t>((rows + kTileRows - 1) / kTileRows) * groups;
  const uint64_t layer_bytes = tiles * kTileBytes;
  const int layers = static_cast<int>(std::max<uint64_t>(2, (options.rotate + layer_bytes - 1) / layer_bytes));
  const int kernels = (kKernels + layers - 1) / layers * layers;
  const unsigned blocks = static_cast<unsigned>((rows * 32 + kThreads - 1) / kThreads);

  uint8_t* weights;
  float *x, *y;
  check(cudaMalloc(&weights, layers * layer_bytes), "allocating the weights");
  check(cudaMalloc(&x, options.columns * sizeof(float)), "allocating x");
  check(cudaMalloc(&y, rows * sizeof(float)), "allocating y");
  const std::vector<float> host_x = activations(options.columns);
  check(cudaMemcpy(x, host_x.data(), options.columns * sizeof(float), cudaMemcpyHostToDevice), "copying x");
  fill<<<4096, kThreads>>>(weights, layers * tiles);
  check(cudaGetLastError(), "filling the weights");

  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "making a stream");
  const auto launch = [&](int layer) {
    product<<<blocks, kThreads, 0, stream>>>(weights + layer * layer_bytes, x, y, static_cast<int>(rows), groups);
    check(cudaGetLastError(), "launching the product");
  };
  double error = 0;
  for (const int layer : {0, layers - 1}) {
    check(cudaDeviceSynchronize(), "filling the weights");
    check(cudaMemset(y, 0xff, rows * sizeof(float)), "poisoning y");  // NaN: every row must be written
    launch(layer);
    std::vector<float> host_y(rows);
    check(cudaStreamSynchronize(stream), "running the product");
    check(cudaMemcpy(host_y.data(), y, rows * sizeof(float), cudaMemcpyDeviceToHost), "copying y");
    for (const float value : host_y)
      if (!std::isfinite(value)) error = HUGE_VAL;
    error = std::max(error, max_rel(host_y, host_x, layer * tiles, rows, groups));
  }
  const double nbytes = 0.5625 * rows * options.columns + 4.0 * (rows + options.columns);
  if (!(error <= kBound)) {
    std::printf("{\"nbytes\": %.0f, \"max_rel\": %.3e, \"layers\": %d}\n", nbytes, std::min(error, 1e300), layers);
    return;
  }

  cudaGraph_t graph;
  cudaGraphExec_t program;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "beginning a capture");
  for (int i = 0; i < kernels; ++i) launch(i % layers);
  check(cudaStreamEndCapture(stream, &graph), "ending the capture");
  check(cudaGraphInstantiate(&program, graph, 0), "making a graph");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "making an event");
  check(cudaEventCreate(&end), "making an event");
  const auto milliseconds = [&] {
    float taken;
    check(cudaEventRecord(begin, stream), "recording");
    check(cudaGraphLaunch(program, stream), "launching the graph");
    check(cudaEventRecord(end, stream), "recording");
    check(cudaEventSynchronize(end), "running the graph");
    check(cudaEventElapsedTime(&taken, begin, end), "reading the time");
    return static_cast<double>(taken);
  };
  for (double warmed = 0; warmed < kWarmMilliseconds;) warmed += milliseconds();
  std::vector<double> taken;
  for (double spent = 0; spent < 1e3 * options.seconds || taken.size() < kRounds;) {
    const double ms = milliseconds();
    spent += ms;
    taken.push_back(1e3 * ms / kernels);
  }
  const double us = percentile(taken, 0.5);
  std::printf(
      "{\"nbytes\": %.0f, \"max_rel\": %.3e, \"layers\": %d, \"us\": %.4f, \"us_p10\": %.4f, \"us_p90\": %.4f, "
      "\"us_with_glue\": %.4f, \"kernels\": %d, \"rounds\": %zu}\n",
      nbytes, error, layers, us, percentile(taken, 0.1), percentile(taken, 0.9), us, kernels, taken.size());
}

}  // namespace

int main(int count, char** arguments) {
  try {
    run(parse(count, arguments));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "published_design: %s\n", error.what());
    return 1;
  }
  return 0;
}
