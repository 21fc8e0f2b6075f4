// Draws a few rows by several lanes, to be run under ThreadSanitizer: a lane that reads a logit, or
// writes one, without a sync between is reported as a race. Prints what was drawn.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "device/draw.h"
#include "device/lanes.h"

using namespace pyserve;

namespace {

constexpr int kVocabulary = 300, kWidth = 3;

Wish wish(float temperature) {
  return {
      .position = 5, .temperature = temperature, .top_p = 1, .repetition = 1, .logprobs = kWidth};
}

void draw(const Wish& wish, std::vector<Edit> edits, int lanes) {
  std::vector<float> logits(kVocabulary);
  for (int i = 0; i < kVocabulary; ++i) logits[i] = float(i * 7919 % 613) / 100;
  int token = -1, status = -1, top_ids[kWidth];
  float logprob = 0, top_logprobs[kWidth];
  const DrawRows rows = {logits.data(), kVocabulary, &wish,   edits.data(), kWidth,
                         &token,        &logprob,    top_ids, top_logprobs, &status};
  run_lanes(lanes, [&](const auto& lane) { rows(lane, 0); });
  std::printf("%d %a %d\n", token, logprob, status);
}

}  // namespace

int main(int, char** arguments) {
  const int lanes = std::atoi(arguments[1]);
  draw(wish(1), {}, lanes);
  draw(wish(0), {}, lanes);
  Wish filtered = wish(1);
  filtered.top_k = 7;
  filtered.top_p = 0.8f;
  draw(filtered, {}, lanes);
  const std::vector<Edit> edits = {{3, bits_of(2.0f), 0},
                                   {282, bits_of(-INFINITY), 0},
                                   {3, bits_of(-INFINITY), 0},
                                   {9, 2, 0},
                                   {11, 0, 0},
                                   {3, 1, 0}};
  for (const float temperature : {0.0f, 1.0f}) {
    Wish edited = wish(temperature);
    edited.bias_end = edited.seen_begin = 3;
    edited.seen_end = 6;
    edited.logprobs = -1;  // nothing between the best logit and the first edit
    edited.repetition = 1.3f;
    edited.frequency = 0.5f;
    draw(edited, edits, lanes);
  }
}
