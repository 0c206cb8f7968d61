"""The registry's changes of adapters as Lua scripts: each happens as a whole or not at all.

It owns the layout of the keys and the text of the scripts; it knows no connection. They run on
Redis 6.2 and later. `tenant_scripts` and `lease_scripts` are its siblings.

    {lorafleet}:state              hash: `generation` counts changes, `incarnation` names the data,
                                   `rebuilding` while it is put back after a loss
    {lorafleet}:changes            stream, trimmed: entry <generation>-0 says what changed
    {lorafleet}:names              sorted set of all adapter names, by bytes
    {lorafleet}:adapter:<name>     hash: `version:<id>` = "<generation> <manifest>",
                                   `alias:<alias>` = target, `undo:<alias>` = its earlier targets,
                                   `label:<key>`, `pin:<id>` = replicas, `revision`, `num_versions`,
                                   `bytes` of all files
    {lorafleet}:history:<name>     list of changes as JSON, newest first
    {lorafleet}:deleted:<name>, :deleted_history:<name>, :deleted_names, :deleted_until
                                   the same of deleted adapters, and when their grace ends
    {lorafleet}:done:<tenant>:<key>   the outcome of a change, for when it is asked for again
    {lorafleet}:tenant:<name>      hash: `quota_*`, `used_adapters`, `used_bytes`, `created_ms`
    {lorafleet}:tenant_names       sorted set, by bytes
    {lorafleet}:keys               hash: API key id = the key as JSON
    {lorafleet}:leases, :lease_deadlines, :lease_epochs   see `lease_scripts`

A change is announced before it is made, so that a script that fails in its first command changed
nothing. Generations are dense: a follower that misses one knows that the stream was trimmed. A
target is a version id, or `<id>=<weight>,<id>=<weight>` where an alias is split.
"""

from __future__ import annotations

MAX_VERSIONS = 4096
"""Most versions of one adapter: GetAdapter answers with all of them in one 4 MiB message."""

MAX_HISTORY = 1000
"""Most changes of one adapter that are remembered."""

MAX_UNDO = 100
"""Most earlier targets of one alias that a rollback can go back to."""

DONE_S = 86_400
"""How long the outcome of a change with an idempotency key is remembered."""

RETRY_S = 30
"""How long that of a change without one is: longer than a lost reply makes the link try again."""

ANNOUNCE = """
-- Whether Redis has lost what the caller has seen: ARGV[2] is "=<incarnation> <generation>" then.
local function lost(state)
  local incarnation, generation = string.match(ARGV[2], '^=(%S+) (%d+)$')
  if not incarnation then return false end
  local now = redis.call('HMGET', state, 'incarnation', 'generation', 'rebuilding')
  return now[1] ~= incarnation or tonumber(now[2] or '0') < tonumber(generation) or now[3]
end

local function announce(state, changes, incarnation, max_changes, kind, name, ...)
  redis.call('HSETNX', state, 'incarnation', incarnation)
  local generation = redis.call('HINCRBY', state, 'generation', 1)
  local id = string.format('%d-0', generation)
  redis.call('XADD', changes, 'MAXLEN', '~', max_changes, id, 'kind', kind, 'name', name,
             'incarnation', redis.call('HGET', state, 'incarnation'), ...)
  return generation
end
"""

# Every change of an adapter has the same head:
# KEYS state, changes, names, adapter, history, done, tenant, deleted, deleted history,
#      deleted names, deleted until
# ARGV name, fresh incarnation (or what was seen), max changes, actor, if_revision, fingerprint,
#      seconds that the outcome is kept, then its own.
_HEAD = (
    ANNOUNCE
    + f"""
local state, changes, names, adapter, history, done, tenant = unpack(KEYS, 1, 7)
local deleted, deleted_history, deleted_names, deleted_until = unpack(KEYS, 8, 11)
local name, actor, if_revision, fingerprint = ARGV[1], ARGV[4], ARGV[5], ARGV[6]
local function at(field) return redis.call('HGET', adapter, field) end

if lost(state) then return {{'lost', ''}} end
local before = redis.call('GET', done)
if before then
  if string.sub(before, 1, #fingerprint + 1) ~= fingerprint .. ' ' then
    return {{'reused', ''}}
  end
  local outcome = string.sub(before, #fingerprint + 2)
  return {{'again', outcome, outcome == 'done ' and redis.call('HGETALL', adapter) or nil}}
end
if if_revision ~= '0' and (at('revision') or '0') ~= if_revision then
  return {{'stale', at('revision') or '0'}}
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

-- Announces a change of this adapter and writes it into its history.
local function change(action, alias, before, after)
  local generation = announce(state, changes, ARGV[2], ARGV[3], 'adapter', name)
  redis.call('HSET', adapter, 'revision', string.format('%d', generation))
  redis.call('LPUSH', history, cjson.encode({{
    revision = generation, action = action, alias = alias, before = before or '',
    after = after or '', at_ms = now_ms, actor = actor}}))
  redis.call('LTRIM', history, 0, {MAX_HISTORY} - 1)
  return generation
end

-- Remembers what an alias meant, for rollbacks.
local function remember(alias, target)
  if not target then return end
  local earlier = {{}}
  for each in string.gmatch(at('undo:' .. alias) or '', '[^;]+') do earlier[#earlier + 1] = each end
  earlier[#earlier + 1] = target
  while #earlier > {MAX_UNDO} do table.remove(earlier, 1) end
  redis.call('HSET', adapter, 'undo:' .. alias, table.concat(earlier, ';'))
end

-- A reply to 'done' has the adapter as it is at this moment: read later, it may be gone.
local function finish(outcome, value)
  redis.call('SET', done, fingerprint .. ' ' .. outcome .. ' ' .. value, 'EX', ARGV[7])
  return {{outcome, value, outcome == 'done' and redis.call('HGETALL', adapter) or nil}}
end

-- The name of the quota that so many more adapters and bytes would break, or nil.
local function over(adapters, bytes)
  local used = redis.call('HMGET', tenant, 'used_adapters', 'used_bytes', 'quota_adapters',
                          'quota_bytes')
  local function above(used, more, quota)
    quota = tonumber(quota or '0')
    return more > 0 and quota > 0 and tonumber(used or '0') + more > quota
  end
  if above(used[1], adapters, used[3]) then return 'adapters ' .. used[3] end
  if above(used[2], bytes, used[4]) then return 'bytes ' .. used[4] end
end

local function use(adapters, bytes)
  redis.call('HINCRBY', tenant, 'used_adapters', adapters)
  redis.call('HINCRBY', tenant, 'used_bytes', string.format('%d', bytes))
end
"""
)

# ARGV[8..]: id, manifest, if_new, most versions, bytes of its files, labels as JSON, tenant,
# whether to make the tenant, key of the tenants' names.
PUBLISH = (
    _HEAD
    + """
local id, manifest, if_new, max_versions = ARGV[8], ARGV[9], ARGV[10] == '1', tonumber(ARGV[11])
local bytes, labels = tonumber(ARGV[12]), cjson.decode(ARGV[13])
local stored = at('version:' .. id)
local num_versions = tonumber(at('num_versions') or '0')
if if_new and num_versions > (stored and 1 or 0) then return {'taken', at('alias:latest')} end
if not stored and num_versions >= max_versions then return {'full', tostring(num_versions)} end
if ARGV[14] ~= 'default' and redis.call('EXISTS', tenant) == 0 then
  if ARGV[15] ~= '1' then return {'no tenant', ARGV[14]} end
end
local new_labels = false
for key, value in pairs(labels) do
  if at('label:' .. key) ~= value then new_labels = true end
end
local latest = at('alias:latest')
if stored and latest == id and not new_labels then return finish('existed', stored) end
if not stored then
  local quota = over(num_versions == 0 and 1 or 0, bytes)
  if quota then return {'quota', quota} end
end
local generation = change('push', 'latest', latest, id)
if ARGV[14] ~= 'default' and redis.call('EXISTS', tenant) == 0 then
  redis.call('HSET', tenant, 'created_ms', string.format('%d', now_ms))
  redis.call('ZADD', ARGV[16], 0, ARGV[14])
end
if latest ~= id then remember('latest', latest) end
redis.call('HSET', adapter, 'alias:latest', id)
for key, value in pairs(labels) do redis.call('HSET', adapter, 'label:' .. key, value) end
if stored then return finish('existed', stored) end
redis.call('HSET', adapter, 'version:' .. id, string.format('%d ', generation) .. manifest)
redis.call('HINCRBY', adapter, 'num_versions', 1)
redis.call('HINCRBY', adapter, 'bytes', string.format('%d', bytes))
redis.call('ZADD', names, 0, name)
use(num_versions == 0 and 1 or 0, bytes)
return finish('published', manifest)
"""
)

# ARGV[8..]: alias, target, action, then the ids in the target.
SET_ALIAS = (
    _HEAD
    + """
local alias, target = ARGV[8], ARGV[9]
if redis.call('EXISTS', adapter) == 0 then return {'no adapter', ''} end
for i = 11, #ARGV do
  if redis.call('HEXISTS', adapter, 'version:' .. ARGV[i]) == 0 then
    return {'no version', ARGV[i]}
  end
end
local before = at('alias:' .. alias)
if before ~= target then
  change(ARGV[10], alias, before, target)
  remember(alias, before)
  redis.call('HSET', adapter, 'alias:' .. alias, target)
end
return finish('done', '')
"""
)

# ARGV[8]: alias.
REMOVE_ALIAS = (
    _HEAD
    + """
local alias = ARGV[8]
if redis.call('EXISTS', adapter) == 0 then return {'no adapter', ''} end
local before = at('alias:' .. alias)
if not before then return {'no alias', alias} end
change('remove_alias', alias, before)
remember(alias, before)
redis.call('HDEL', adapter, 'alias:' .. alias)
return finish('done', '')
"""
)

# ARGV[8]: alias.
ROLLBACK = (
    _HEAD
    + """
local alias = ARGV[8]
if redis.call('EXISTS', adapter) == 0 then return {'no adapter', ''} end
local earlier = {}
for each in string.gmatch(at('undo:' .. alias) or '', '[^;]+') do earlier[#earlier + 1] = each end
local target = table.remove(earlier)
if not target then return {'nothing', alias} end
change('rollback', alias, at('alias:' .. alias), target)
redis.call('HSET', adapter, 'alias:' .. alias, target, 'undo:' .. alias, table.concat(earlier, ';'))
return finish('done', '')
"""
)

# ARGV[8]: labels as JSON.
SET_LABELS = (
    _HEAD
    + """
if redis.call('EXISTS', adapter) == 0 then return {'no adapter', ''} end
local labels, before = cjson.decode(ARGV[8]), {}
local fields = redis.call('HGETALL', adapter)
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, 6) == 'label:' then
    before[string.sub(fields[i], 7)] = fields[i + 1]
  end
end
local same = true
for key, value in pairs(labels) do same = same and before[key] == value end
for key in pairs(before) do same = same and labels[key] ~= nil end
if same then return finish('done', '') end
change('set_labels', '')
for key in pairs(before) do redis.call('HDEL', adapter, 'label:' .. key) end
for key, value in pairs(labels) do redis.call('HSET', adapter, 'label:' .. key, value) end
return finish('done', '')
"""
)

# ARGV[8..]: id, replicas.
PIN = (
    _HEAD
    + """
if redis.call('EXISTS', adapter) == 0 then return {'no adapter', ''} end
if not at('version:' .. ARGV[8]) then return {'no version', ARGV[8]} end
local field, replicas = 'pin:' .. ARGV[8], ARGV[9]
if (at(field) or '0') ~= replicas then
  change('pin', '')
  if replicas == '0' then redis.call('HDEL', adapter, field)
  else redis.call('HSET', adapter, field, replicas) end
end
return finish('done', '')
"""
)

# ARGV[8..]: id, replicas. A hint: nothing but the feed remembers it.
PREFETCH = (
    _HEAD
    + """
if redis.call('EXISTS', adapter) == 0 then return {'no adapter', ''} end
if not at('version:' .. ARGV[8]) then return {'no version', ARGV[8]} end
announce(state, changes, ARGV[2], ARGV[3], 'prefetch', name,
         'version', ARGV[8], 'replicas', ARGV[9])
return finish('done', '')
"""
)

# ARGV[8]: grace in ms.
DELETE = (
    _HEAD
    + """
if redis.call('EXISTS', adapter) == 0 then return {'no adapter', ''} end
local until_ms = now_ms + tonumber(ARGV[8])
local bytes = tonumber(at('bytes') or '0')
change('delete', '')
redis.call('DEL', deleted, deleted_history)
redis.call('RENAME', adapter, deleted)
redis.call('RENAME', history, deleted_history)
redis.call('ZREM', names, name)
redis.call('ZADD', deleted_names, 0, name)
redis.call('ZADD', deleted_until, string.format('%d', until_ms), name)
use(-1, -bytes)
return finish('deleted', string.format('%d', until_ms))
"""
)

RESTORE = (
    _HEAD
    + """
if redis.call('EXISTS', adapter) == 1 then return {'taken', ''} end
if redis.call('EXISTS', deleted) == 0 then return {'no adapter', ''} end
local bytes = tonumber(redis.call('HGET', deleted, 'bytes') or '0')
local quota = over(1, bytes)
if quota then return {'quota', quota} end
local generation = announce(state, changes, ARGV[2], ARGV[3], 'adapter', name)
redis.call('RENAME', deleted, adapter)
if redis.call('EXISTS', deleted_history) == 1 then
  redis.call('RENAME', deleted_history, history)
end
redis.call('HSET', adapter, 'revision', string.format('%d', generation))
redis.call('LPUSH', history, cjson.encode({revision = generation, action = 'restore', alias = '',
                                           before = '', after = '', at_ms = now_ms, actor = actor}))
redis.call('ZREM', deleted_names, name)
redis.call('ZREM', deleted_until, name)
redis.call('ZADD', names, 0, name)
use(1, bytes)
return finish('done', '')
"""
)

# Forgets a tombstone whose grace has ended.
PURGE = (
    _HEAD
    + """
local until_ms = redis.call('ZSCORE', deleted_until, name)
if not until_ms or tonumber(until_ms) > now_ms then return {'kept', ''} end
redis.call('DEL', deleted, deleted_history)
redis.call('ZREM', deleted_names, name)
redis.call('ZREM', deleted_until, name)
return {'purged', ''}
"""
)

# KEYS names. ARGV prefix of the hashes, lowest name, highest name, most names, most looked at,
# text to contain, number of tenants, tenants..., then label keys and values.
# Returns the last name looked at, '1' if there are no more, then the names found.
FIND = """
local prefix, low, high = ARGV[1], ARGV[2], ARGV[3]
local limit, scan = tonumber(ARGV[4]), tonumber(ARGV[5])
local text, num_tenants = ARGV[6], tonumber(ARGV[7])
local tenants = {}
for i = 8, 7 + num_tenants do tenants[ARGV[i]] = true end
local function fits(name)
  if text ~= '' and not string.find(name, text, 1, true) then return false end
  if num_tenants > 0 and not tenants[string.match(name, '^([^/]+)/') or 'default'] then
    return false
  end
  for i = 8 + num_tenants, #ARGV, 2 do
    if redis.call('HGET', prefix .. name, 'label:' .. ARGV[i]) ~= ARGV[i + 1] then return false end
  end
  return true
end
local found = redis.call('ZRANGEBYLEX', KEYS[1], low, high, 'LIMIT', 0, scan)
local reply = {'', #found < scan and '1' or '0'}
for i, name in ipairs(found) do
  reply[1] = name
  if fits(name) then
    reply[#reply + 1] = name
    if #reply - 2 == limit then
      if i < #found then reply[2] = '0' end
      break
    end
  end
end
return reply
"""
