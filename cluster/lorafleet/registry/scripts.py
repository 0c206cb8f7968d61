"""The registry's changes as Lua scripts: each happens as a whole or not at all.

It owns the layout of the keys and the text of the scripts; it knows no connection. They run on
Redis 6.2 and later.

    {lorafleet}:state            hash: `generation` counts changes, `incarnation` names the database
    {lorafleet}:names            sorted set of all adapter names, by bytes
    {lorafleet}:adapter:<name>   hash: `version:<id>` = "<generation> <manifest>",
                                 `alias:<alias>` = id, `num_versions`
    {lorafleet}:changes          stream, trimmed: entry <generation>-0 names the changed adapter
    {lorafleet}:leases           hash: replica id = lease as JSON
    {lorafleet}:lease_deadlines  sorted set: replica id by deadline, in ms of Redis's own clock
    {lorafleet}:lease_epochs     hash: replica id = newest epoch

A change is announced before it is made, so that a script that fails in its first command changed
nothing. Generations are dense: a follower that misses one knows that the stream was trimmed.
"""

from __future__ import annotations

MAX_VERSIONS = 4096
"""Most versions of one adapter: GetAdapter answers with all of them in one 4 MiB message."""

_ANNOUNCE = """
local function announce(state, changes, name, incarnation, max_changes)
  redis.call('HSETNX', state, 'incarnation', incarnation)
  local generation = redis.call('HINCRBY', state, 'generation', 1)
  local id = string.format('%d-0', generation)
  redis.call('XADD', changes, 'MAXLEN', '~', max_changes, id,
             'name', name, 'incarnation', redis.call('HGET', state, 'incarnation'))
  return generation
end
"""

# Every change has the same head: KEYS state, changes, names, adapter;
# ARGV name, fresh incarnation, max_changes, then its own.
PUBLISH = (
    _ANNOUNCE
    + """
local state, changes, names, adapter = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local name, id, manifest = ARGV[1], ARGV[4], ARGV[5]
local if_new, max_versions = ARGV[6] == '1', tonumber(ARGV[7])
local stored = redis.call('HGET', adapter, 'version:' .. id)
local num_versions = tonumber(redis.call('HGET', adapter, 'num_versions') or '0')
if if_new and num_versions > (stored and 1 or 0) then
  return {'taken', redis.call('HGET', adapter, 'alias:latest')}
end
if not stored and num_versions >= max_versions then
  return {'full', tostring(num_versions)}
end
if stored and redis.call('HGET', adapter, 'alias:latest') == id then
  return {'existed', stored}
end
local generation = announce(state, changes, name, ARGV[2], ARGV[3])
redis.call('HSET', adapter, 'alias:latest', id)
if stored then
  return {'existed', stored}
end
redis.call('HSET', adapter, 'version:' .. id, string.format('%d ', generation) .. manifest)
redis.call('HINCRBY', adapter, 'num_versions', 1)
redis.call('ZADD', names, 0, name)
return {'published', manifest}
"""
)

SET_ALIAS = (
    _ANNOUNCE
    + """
local state, changes, adapter = KEYS[1], KEYS[2], KEYS[4]
local alias, id = ARGV[4], ARGV[5]
if redis.call('EXISTS', adapter) == 0 then return 'no adapter' end
if redis.call('HEXISTS', adapter, 'version:' .. id) == 0 then return 'no version' end
if redis.call('HGET', adapter, 'alias:' .. alias) ~= id then
  announce(state, changes, ARGV[1], ARGV[2], ARGV[3])
  redis.call('HSET', adapter, 'alias:' .. alias, id)
end
return 'set'
"""
)

DELETE = (
    _ANNOUNCE
    + """
local state, changes, names, adapter = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
if redis.call('EXISTS', adapter) == 0 then return 0 end
announce(state, changes, ARGV[1], ARGV[2], ARGV[3])
redis.call('DEL', adapter)
redis.call('ZREM', names, ARGV[1])
return 1
"""
)

_NOW_MS = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# KEYS leases, lease_deadlines, lease_epochs.
# ARGV replica id, lowest epoch, lease without its epoch as JSON, TTL in ms.
REGISTER = (
    _NOW_MS
    + """
local epoch = math.max(tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '0') + 1, tonumber(ARGV[2]))
redis.call('HSET', KEYS[3], ARGV[1], string.format('%d', epoch))
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d ', epoch) .. ARGV[3])
redis.call('ZADD', KEYS[2], string.format('%d', now_ms + ARGV[4]), ARGV[1])
return epoch
"""
)

# ARGV replica id, epoch, TTL in ms. A lease that ran out is revived: nobody newer has taken it.
RENEW = (
    _NOW_MS
    + """
local newest = redis.call('HGET', KEYS[3], ARGV[1])
if not newest or redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 'absent' end
if newest ~= ARGV[2] then return newest end
redis.call('ZADD', KEYS[2], string.format('%d', now_ms + ARGV[3]), ARGV[1])
return 'renewed'
"""
)

# ARGV replica id, epoch.
RELEASE = """
if redis.call('HGET', KEYS[3], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
return redis.call('HDEL', KEYS[1], ARGV[1])
"""

# ARGV ms after its deadline when a lease is forgotten; a late renewal then has to register anew.
LIVE = (
    _NOW_MS
    + """
local dead = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%d', now_ms - ARGV[1]))
for _, replica in ipairs(dead) do
  redis.call('ZREM', KEYS[2], replica)
  redis.call('HDEL', KEYS[1], replica)
end
local live = {}
for _, replica in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2],
                                    string.format('(%d', now_ms), '+inf')) do
  live[#live + 1] = replica
  live[#live + 1] = redis.call('HGET', KEYS[1], replica)
end
return live
"""
)
