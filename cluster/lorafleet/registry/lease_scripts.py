"""The scripts of leases: epochs and deadlines by Redis's own clock; see `leases`."""

from __future__ import annotations

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
