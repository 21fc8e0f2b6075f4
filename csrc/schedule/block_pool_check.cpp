// BlockPool::check: counts everything again, from the tables alone, and compares.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "schedule/block_pool.h"

namespace pyserve {
namespace {

void hold(bool invariant, const std::string& message) {
  if (!invariant) throw std::runtime_error("block pool is inconsistent: " + message);
}

}  // namespace

void BlockPool::check() const {
  std::vector<int32_t> references(num_blocks_, 0);
  std::unordered_map<int64_t, int64_t> tenant_refs;
  int64_t live_rows = 0;
  for (size_t index = 0; index < rows_.size(); ++index) {
    const Row& row = rows_[index];
    const std::string name = "row " + std::to_string(index);
    if (!row.live) {
      hold(row.blocks.empty(), name + " is released and owns blocks");
      continue;
    }
    ++live_rows;
    hold(row.computed <= int64_t(row.tokens.size()), name + " has computed more than its tokens");
    hold(row.computed <= int64_t(row.blocks.size()) * block_size_,
         name + " has computed more than its blocks hold");
    for (int32_t block : row.blocks) ++references[block];
    if (!row.blocks.empty()) tenant_refs[row.tenant] += int64_t(row.blocks.size());
    for (int64_t i = 0; prefix_cache_ && i < row.computed / block_size_; ++i) {
      const int32_t block = row.blocks[i];
      const Prefix parent = i == 0 ? Prefix{row.salt, true} : prefixes_.chain(row.blocks[i - 1]);
      hold(prefixes_.contains(block) && prefixes_.parent(block) == parent &&
               std::ranges::equal(prefixes_.tokens(block), block_tokens(row, i)),
           name + " owns a full block that is filed under another prefix");
    }
  }
  hold(live_rows + int64_t(idle_rows_.size()) == int64_t(rows_.size()), "rows are lost");
  hold(tenant_refs == tenant_refs_, "a tenant's blocks do not add up");
  hold(references == references_, "reference counts differ from the block tables");

  int64_t owned = 0, cached = 0, filed = 0, listed = 0;
  for (int32_t block = 0; block < num_blocks_; ++block) {
    hold(free_.contains(block) == (references[block] == 0),
         "block " + std::to_string(block) + " is both free and owned, or neither");
    owned += references[block] > 0;
    filed += prefixes_.contains(block);
    if (!prefixes_.contains(block)) continue;
    cached += references[block] == 0;
    const int32_t found = prefixes_.find(prefixes_.parent(block), prefixes_.tokens(block));
    hold(found >= 0 && prefixes_.chain(found) == prefixes_.chain(block),
         "block " + std::to_string(block) + " cannot be found by its prefix");
  }
  for (int32_t block = free_.front(); block != free_.end(); block = free_.after(block)) ++listed;
  hold(listed == free_.size(), "the free list is broken");
  hold(cached == cached_ && filed == prefixes_.size(), "the prefix table does not add up");
  hold(owned + free_.size() == num_blocks_, "free + cached + owned != num_blocks");
}

}  // namespace pyserve
