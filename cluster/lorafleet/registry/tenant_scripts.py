"""The scripts of tenants and API keys; the keys' layout is in `scripts`.

KEYS state, changes, tenant, tenant names, API keys, ids of the tenant's API keys.
ARGV name of the tenant, fresh incarnation, max changes, then each script's own.
"""

from __future__ import annotations

from lorafleet.registry.scripts import ANNOUNCE

_HEAD = (
    ANNOUNCE
    + """
local state, changes, tenant, tenant_names, keys, key_ids = unpack(KEYS)
local name = ARGV[1]
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
if lost(state) then return 'lost' end
local function change(kind, what) announce(state, changes, ARGV[2], ARGV[3], kind, what) end
"""
)

# ARGV[4..]: fields and values of the quota.
CREATE = (
    _HEAD
    + """
if redis.call('EXISTS', tenant) == 1 then return 'taken' end
change('tenant', name)
redis.call('HSET', tenant, 'created_ms', string.format('%d', now_ms), unpack(ARGV, 4))
redis.call('ZADD', tenant_names, 0, name)
return 'done'
"""
)

# ARGV[4]: whether the tenant is always there; then as CREATE.
SET_QUOTA = (
    _HEAD
    + """
if ARGV[4] ~= '1' and redis.call('HEXISTS', tenant, 'created_ms') == 0 then return 'no tenant' end
change('tenant', name)
redis.call('HSET', tenant, unpack(ARGV, 5))
return 'done'
"""
)

DELETE = (
    _HEAD
    + """
if redis.call('HEXISTS', tenant, 'created_ms') == 0 then return 'no tenant' end
local used = tonumber(redis.call('HGET', tenant, 'used_adapters') or '0')
if used > 0 then return string.format('%d', used) end
change('tenant', name)
for _, id in ipairs(redis.call('SMEMBERS', key_ids)) do
  change('key', id)
  redis.call('HDEL', keys, id)
end
redis.call('DEL', tenant, key_ids)
redis.call('ZREM', tenant_names, name)
return 'done'
"""
)

# ARGV[4..]: whether the tenant is always there, key id, the key as JSON.
CREATE_KEY = (
    _HEAD
    + """
if ARGV[4] ~= '1' and redis.call('HEXISTS', tenant, 'created_ms') == 0 then return 'no tenant' end
change('key', ARGV[5])
redis.call('HSET', keys, ARGV[5], ARGV[6])
redis.call('SADD', key_ids, ARGV[5])
return 'done'
"""
)

# ARGV[4]: key id.
REVOKE_KEY = (
    _HEAD
    + """
if redis.call('SISMEMBER', key_ids, ARGV[4]) == 0 then return 'no key' end
change('key', ARGV[4])
redis.call('HDEL', keys, ARGV[4])
redis.call('SREM', key_ids, ARGV[4])
return 'done'
"""
)
